"""lm-evaluation-harness: tasks of one's own, offline; skipped where the optional package is not installed."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from palimpsa_surgery.base.errors import EvaluationError, UsageError
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.recipes.evaluation import evaluate as evaluation
from palimpsa_surgery.recipes.evaluation import harness
from palimpsa_surgery.recipes.evaluation.evaluate import evaluate
from transformers import AutoTokenizer

DATA = Path(__file__).parents[2] / "data"
TASKS = [str(DATA / "tiny_task.yaml"), str(DATA / "tiny_text_task.yaml")]
needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")


@pytest.fixture(scope="module")
def report(model_folder):
    """The embedded checkpoint, beside a model that knows nothing."""
    pytest.importorskip("lm_eval")
    return evaluate(embedded_checkpoint_path(), model_folder, lm_eval=TASKS)


@pytest.mark.slow
def test_each_metric_of_each_task_is_a_row(report):
    assert set(report.suites) == {"lm_eval"}
    rows = {row.name: row for row in report.suites["lm_eval"].rows}
    assert set(rows) == {
        "tiny_task acc",
        "tiny_task acc_norm",
        "tiny_text_task word_perplexity",
        "tiny_text_task bits_per_byte",
    }
    assert rows["tiny_task acc"].model.value >= 0.5, "the checkpoint was trained on such text"
    assert rows["tiny_task acc"].better == "higher"
    assert rows["tiny_text_task bits_per_byte"].better == "lower"
    assert rows["tiny_text_task bits_per_byte"].difference.value < -0.5
    for row in rows.values():
        assert row.samples == 6, "paired over the questions"
        assert row.difference.error is not None


@needs_harness
@pytest.mark.parametrize("length", [64, 8])
def test_questions_longer_than_asked_for_are_counted(length):
    questions = runpy.run_path(str(DATA / "tiny_task.py"))["QUESTIONS"]
    pairs = [(prompt, ending) for prompt, endings, _ in questions for ending in endings]
    tokenizer = AutoTokenizer.from_pretrained(embedded_checkpoint_path())
    longer = sum(len(tokenizer(f"{prompt} {ending}")["input_ids"]) > length + 1 for prompt, ending in pairs)
    assert (longer > 0) == (length == 8)
    notes = evaluate(embedded_checkpoint_path(), lm_eval=TASKS[:1], lengths=(length,)).suites["lm_eval"].notes
    assert notes == (
        [f"{longer} inputs longer than 8 tokens lost the beginning; give more --lengths"] if longer else []
    )


@needs_harness
def test_an_answer_longer_than_asked_for_is_refused():
    with pytest.raises(UsageError, match=r"an answer of the task has .* tokens, and at most 2 are read; give more"):
        evaluate(embedded_checkpoint_path(), lm_eval=TASKS[:1], lengths=(2,))


class Encoder:
    """As much of the harness's model as cuts: rows of tokens, padded on the left."""

    max_length = 3

    def tok_batch_encode(self, rows):
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        return ids, (ids > 0).long()


def test_prompts_of_generation_that_are_cut_are_counted():
    model = harness._counting(Encoder)()
    ids, mask = model.tok_batch_encode([[1, 2, 3, 4], [5, 6], [7, 8, 9]], left_truncate_len=3)
    assert model.cut == 1
    assert ids.tolist() == [[2, 3, 4], [0, 5, 6], [7, 8, 9]]
    assert mask.tolist() == [[1, 1, 1], [0, 1, 1], [1, 1, 1]]


@pytest.mark.slow
def test_the_harness_itself_gives_the_same_figures_for_our_folder(converted_by_hand, tmp_path):
    """What `lm_eval --model hf` does: it loads the folder with its own code, where the package cannot be imported."""
    arguments = f"pretrained={converted_by_hand},trust_remote_code=True,dtype=float32"
    command = [sys.executable, "-c", PROGRAM, arguments, str(DATA), str(tmp_path / "results.json")]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads((tmp_path / "results.json").read_text())
    ours = evaluate(converted_by_hand, lm_eval=TASKS[:1])
    for metric in ("acc", "acc_norm"):
        assert ours.row("lm_eval", f"tiny_task {metric}").model.value == pytest.approx(theirs[f"{metric},none"])


PROGRAM = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "palimpsa_surgery":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
tasks = TaskManager(include_path=sys.argv[2], include_defaults=False)  # the thousand others take a minute to read
found = simple_evaluate("hf", sys.argv[1], ["tiny_task"], device="cpu", task_manager=tasks)
with open(sys.argv[3], "w") as stream:
    json.dump(found["results"]["tiny_task"], stream)
"""


@pytest.fixture(scope="module")
def converted_by_hand(model_folder, tmp_path_factory):
    """The tiny converted model with its code beside it, as a conversion leaves it."""
    import shutil

    from palimpsa_surgery.modeling.bundle import auto_map, bundle_remote_code

    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("hub") / "model"
    shutil.copytree(model_folder, folder)
    bundle_remote_code(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto_map()}))
    return folder


@pytest.fixture
def never_loaded(monkeypatch):
    """What can be refused is refused before a model is loaded, let alone measured for hours by the suites."""
    monkeypatch.setattr(evaluation, "load_model", lambda *args, **options: pytest.fail("the model was loaded"))


def test_without_the_package_the_error_says_what_to_install(model_folder, monkeypatch, never_loaded):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(EvaluationError, match=r"needs the package lm-eval.*install palimpsa-surgery\[eval\]"):
        evaluate(model_folder, suites=("loss",), lm_eval=["lambada"])


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_no_question_is_refused(model_folder, never_loaded, limit):
    with pytest.raises(UsageError, match=f"--lm-eval-limit {limit}: expected 1 question or more"):
        evaluate(model_folder, lm_eval=["lambada"], lm_eval_limit=limit)


@needs_harness
def test_an_unknown_task_is_refused_by_name(model_folder, monkeypatch, never_loaded):
    from lm_eval.tasks import TaskManager

    # Without the thousand tasks of the harness, which take a minute to read.
    few = lambda include_path, **_: TaskManager(include_path=include_path, include_defaults=False)  # noqa: E731
    monkeypatch.setattr("lm_eval.tasks.TaskManager", few)
    with pytest.raises(UsageError, match="knows no task no_such_task; `lm_eval ls tasks`"):
        evaluate(model_folder, lm_eval=["no_such_task", TASKS[0]])


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file; give a task's name"), ("metric_list: []", "the file names no task")]
)
def test_a_file_that_is_no_task_is_refused(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message):
        harness._named([str(path)])


def test_names_and_files_may_be_mixed():
    assert harness._named(["lambada", *TASKS]) == (["lambada", "tiny_task", "tiny_text_task"], [str(DATA)])


@pytest.mark.parametrize(
    ("values", "figure", "exponential"),
    [
        ([1.0, 0.0, 1.0, 1.0], 0.75, False),
        ([True, False], 0.5, False),
        ([-1.0, -3.0], float(np.exp(2.0)), True),
        ([(-10.0, 4), (-20.0, 6)], float(np.exp(3.0)), True),
        ([(-10.0, 4), (-20.0, 6)], 3.0 / float(np.log(2)), False),
    ],
)
def test_samples_are_kept_when_they_give_the_figure(values, figure, exponential):
    samples, found = harness._samples(values, figure)
    assert len(samples) == len(values)
    assert found is exponential


@pytest.mark.parametrize("values", [[], [None, None], ["a", "b"], [1.0, 0.0]])
def test_samples_that_do_not_give_the_figure_are_not_used(values):
    assert harness._samples(values, 0.3) == (None, False)


def test_a_figure_without_samples_keeps_the_harness_error():
    results = {"f1,none": 0.4, "f1_stderr,none": 0.1, "exact,strict": 0.5, "exact_stderr,strict": "N/A", "alias": "t"}
    first, second = harness._measurements({"results": {"t": results}, "higher_is_better": {"t": {"f1": True}}})
    assert (first.name, first.error, first.better) == ("t f1", 0.1, "higher")
    assert (second.name, second.error, second.better) == ("t exact (strict)", None, None)
