"""The experiment on language in small: every stage runs through the package, and a second call repeats nothing."""

import dataclasses
import json
import multiprocessing
import os
import shutil

import language
import language_arms
import pico
import pytest
from language_arms import CONTROL, MAIN, SOURCE, Arm, Preset, Variant
from language_results import read_results
from language_run import Experiment, pieces, plan_of, recipe_of
from palimpsa_surgery.base.text import embedded_checkpoint_path

TINY = Preset(
    note="",
    recipe="tiny_cpu",
    layers=1,
    tokens=128,
    seq_len=32,
    batch_size=2,
    micro_batch_size=1,
    lrs=(1e-3,),
    lr_new=1e-2,
    beta_groups=1,
    seeds=(0,),
    eval_length=64,
    eval_tokens=256,
    dev_windows=2,
    probe_lengths=(64,),
    probe_pairs=(2,),
    probe_trials=2,
    ablated=(MAIN,),
    measure_tokens=128,
    pieces=(20, 120),
    changes={"data.packing": "stream"},
)
VARIANTS = {CONTROL: Variant(), MAIN: Variant("window"), "all": Variant("all", "paper", per_channel=True, mode="new")}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A source of two layers with a real tokenizer, and two texts."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "model").mkdir()
    pico.write_mamba_ssm(folder / "model", layers=2, vocab=4093, rows=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded_checkpoint_path() / name, folder / "model" / name)
    words = ["table", "index", "commit", "reads", "every", "row", "of", "the", "page", "before", "it", "ends"]
    for name, count, step in (("train", 30, 5), ("val", 24, 7)):
        texts = [" ".join(words[(step * n + i * i) % len(words)] for i in range(60)) for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def arguments(folder, out):
    texts = ["--train", str(folder / "train.jsonl"), "--val", str(folder / "val.jsonl")]
    return ["--preset", "tiny", "--model", str(folder / "model"), *texts, "-o", str(out)]


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(language_arms.PRESETS, "tiny", TINY)
        patch.setattr(language_arms, "EARLY", ())
        for name in set(language_arms.VARIANTS) - set(VARIANTS):
            patch.delitem(language_arms.VARIANTS, name)
        patch.setitem(language_arms.VARIANTS, "all", VARIANTS["all"])
        assert language.main(arguments(inputs, out)) == 0
        before = {path: path.stat().st_mtime_ns for path in (out / "raw").iterdir()}
        assert language.main(arguments(inputs, out)) == 0
    assert before == {path: path.stat().st_mtime_ns for path in (out / "raw").iterdir()}, "finished arms ran again"
    return out


@pytest.fixture(scope="module")
def results(finished):
    return read_results(finished / "raw")


def test_every_arm_ran_alike(results):
    assert set(results) == {SOURCE, *(f"{variant}-lr0.001-s0" for variant in VARIANTS)}
    trained = [result for name, result in results.items() if name != SOURCE]
    assert {(result.steps, result.tokens) for result in trained} == {(2, 128)}
    assert all(len(result.dev) == 2 for result in trained)


def test_surgery_is_that_of_the_variant(results):
    main, everything, control = (results[f"{name}-lr0.001-s0"] for name in (MAIN, "all", CONTROL))
    assert (main.rule, main.init, main.beta_groups, len(main.palimpsa_layers)) == ("window", "identity", 1, 1)
    assert (everything.init, everything.beta_groups, everything.palimpsa_layers) == ("paper", 8, [0, 1])
    assert control.palimpsa_layers == []
    assert not control.gates
    assert set(main.gates) == set(main.palimpsa_layers)
    assert main.dev[0][1] == pytest.approx(control.dev[0][1], abs=1e-4), "the identity start is the source"


def test_losses_probes_importance_and_windows_are_there(results):
    main = results[f"{MAIN}-lr0.001-s0"]
    assert {row.suite for row in main.rows} == {"positions", "importance", "recall", "needle", "off"}
    assert not results[f"{CONTROL}-lr0.001-s0"].of("off")
    assert [row.at["from"] for row in main.of("positions")] == [1, 16, 32]
    assert len(main.of("positions")[0].sums) == 4
    assert [len(heads) for heads in main.windows] == [4, 4]
    assert [line["step"] for line in main.importance] == [1, 2]


def test_text_that_chooses_is_not_text_that_is_measured(finished):
    dev, test = ((finished / "work" / f"{name}.jsonl").read_text().splitlines() for name in ("dev", "test"))
    assert (len(dev), len(test)) == (6, 18)
    overlap = json.loads((finished / "overlap.json").read_text())
    assert set(overlap["in_runs_of"]) == {"13", "50"}


def test_pieces_come_each_from_another_document():
    documents = [f"{chr(65 + i)}" * (10 + i) for i in range(8)]
    found = pieces(documents, 5, 12)
    assert [len(piece) for piece in found] == [12] * 5
    assert len({piece[0] for piece in found}) == 5
    assert all(any(piece in text for text in documents) for piece in found)
    assert len(pieces(documents, 99, 12)) == 6, "documents that are too short give none"
    assert pieces(documents, 5, 12) == found


def test_training_text_is_the_file_itself_unless_pieces_are_asked_for(inputs, finished, tmp_path):
    kept = (finished / "work" / "train.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["text"]) for line in kept] == [120] * 20
    whole = dataclasses.replace(TINY, pieces=None)
    train = inputs / "train.jsonl"
    assert Experiment("t", whole, "m", train, train, tmp_path).training_text == train


def test_nothing_that_is_kept_names_a_place_on_the_machine(finished):
    for path in [*(finished / "raw").iterdir(), finished / "tables.md", finished / "overlap.json"]:
        assert str(finished.parent) not in path.read_text(encoding="utf-8"), path.name


def test_arms_of_a_seed_differ_in_learning_rate_alone(inputs, tmp_path):
    experiment = Experiment(
        "tiny", TINY, str(inputs / "model"), inputs / "train.jsonl", inputs / "val.jsonl", tmp_path / "a b"
    )
    recipes = [
        recipe_of(experiment, Arm(variant, lr, 3)).model_dump() for variant, lr in ((CONTROL, 1e-5), (MAIN, 2e-3))
    ]
    assert {key for key in recipes[0] if recipes[0][key] != recipes[1][key]} == {"lr", "lr_new"}
    assert recipes[0]["lr"] == 1e-5
    assert recipes[0]["data"]["cache"] == str(tmp_path / "a b" / "work" / "cache")
    assert plan_of(experiment, Arm(CONTROL, 1e-5, 3)) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_arms_run_side_by_side_and_none_is_begun_when_the_time_is_up(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(language_arms.PRESETS, "tiny", dataclasses.replace(TINY, probed=()))
    asked = [*arguments(inputs, tmp_path), "--arms", CONTROL, MAIN]
    assert language.main([*asked, "--minutes", "0"]) == 1
    assert f"{MAIN}-lr0.001-s0: not begun, the time is up" in capsys.readouterr().err
    # A process that is spawned imports everything again; what it is given is pickled for a forked one as well.
    monkeypatch.setattr(multiprocessing, "get_context", lambda method, get=multiprocessing.get_context: get("fork"))
    assert language.main([*asked, "--jobs", "2"]) == 0
    found = read_results(tmp_path / "raw")
    assert set(found) == {SOURCE, f"{CONTROL}-lr0.001-s0", f"{MAIN}-lr0.001-s0"}
    assert not any(result.of("recall") or result.of("needle") for result in found.values())
    assert (tmp_path / "tables.md").is_file()


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        (["--preset", "cpu", "--model", "m"], 2, "--train, --val: is missing; give it, or --report"),
        (["--report"], 1, "holds no result; run the experiment first"),
    ],
)
def test_what_is_missing_is_named(tmp_path, capsys, given, code, message):
    assert language.main([*given, "-o", str(tmp_path)]) == code
    assert message in capsys.readouterr().err
