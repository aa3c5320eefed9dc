"""The recall experiments from training to tables, on models of a few hundred parameters."""

import dataclasses
import json
import math
from pathlib import Path

import mqar
import numpy as np
import pytest
import recall_runs
import surgery_recall
import torch
from mqar_data import Task, recall_batch
from palimpsa_surgery.base.errors import TrainingError, UsageError
from recall_presets import MAMBA2, PALIMPSA, PALIMPSA_D, PER_CHANNEL, PER_HEAD, PRESETS
from recall_runs import Place
from recall_training import (
    TRAIN,
    VALIDATION,
    OutOfTimeError,
    answers,
    build_model,
    train_and_test,
    windows,
)

TINY = dataclasses.replace(
    PRESETS["cpu"],
    vocab=16,
    model={"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "chunk_size": 8},
    train=(Task(8, 2), Task(16, 3)),
    test=(Task(8, 2), Task(16, 2)),
    lrs=(1e-2,),
    seeds=(0, 1),
    steps=2,
    step_tokens=32,
    test_rows=4,
    validation_rows=3,
    records=1,
    surgery_lrs=(1e-3,),
    surgery_steps=2,
)


def without_times(run):
    """What is the same when a run is repeated; where it ran is left out, too."""
    records = [{key: value for key, value in record.items() if key != "seconds"} for record in run["records"]]
    kept = {key: value for key, value in run.items() if key not in ("training_seconds", "environment")}
    return {**kept, "records": records}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Both experiments run to the end."""
    folder = tmp_path_factory.mktemp("recall")
    mqar.train_all(TINY, Place(folder))
    surgery_recall.train_all(dataclasses.replace(TINY, seeds=(0,)), Place(folder))
    return folder


def test_both_arms_start_from_the_same_mamba2():
    plain, metaplastic = (build_model(TINY, arm, 3).state_dict() for arm in (MAMBA2, PALIMPSA))
    assert all(torch.equal(tensor, metaplastic[name]) for name, tensor in plain.items())
    assert all(".metaplasticity." in name for name in metaplastic.keys() - plain.keys())
    other = build_model(TINY, MAMBA2, 4).state_dict()
    assert not torch.equal(other["backbone.embeddings.weight"], plain["backbone.embeddings.weight"])


def test_palimpsa_d_is_an_arm_of_the_same_sizes_with_windows():
    model = build_model(TINY, PALIMPSA_D, 0)
    config = model.config
    assert (config.model_type, config.n_groups, config.beta_groups) == ("palimpsa_d", 2, 1)
    assert {key: getattr(config, key) for key in TINY.model if key != "chunk_size"}.items() <= TINY.model.items()
    found = windows(model.train(), TINY)
    assert model.training
    assert {layer: len(heads) for layer, heads in found.items()} == {"0": 2, "1": 2}
    # The step sizes of the tokens themselves, from the mixers' inputs.
    mixer, seen = model.backbone.layers[0].mixer, []
    hook = mixer.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    generator = np.random.default_rng([VALIDATION, 16, 3])
    with torch.no_grad():
        model(input_ids=recall_batch(Task(16, 3), TINY.vocab, 3, generator).ids, use_cache=False)
        hook.remove()
        decay = mixer.decay_rate().double() * mixer.step_size(mixer.dt_proj(seen[0])).double()
    expected = (1 / (1 - torch.exp(-decay))).mean((0, 1))
    assert found["0"] == pytest.approx(expected.tolist(), rel=1e-4)


def test_the_control_has_no_metaplastic_layer_and_the_other_arm_has_nothing_else():
    assert build_model(TINY, MAMBA2, 0).config.palimpsa_layers == []
    for arm, groups in ((PALIMPSA, 4), (PER_CHANNEL, 8), (PER_HEAD, 1)):
        setting = dataclasses.replace(TINY, metaplastic={**TINY.metaplastic, "beta_groups": 4})
        config = build_model(setting, arm, 0).config
        assert (config.palimpsa_layers, config.beta_groups) == ([0, 1], groups)


@pytest.mark.parametrize("arm", [MAMBA2, PALIMPSA, PALIMPSA_D])
def test_answers_are_the_logits_at_the_questions(arm):
    model = build_model(TINY, arm, 0).eval()
    batch = recall_batch(Task(16, 3), TINY.vocab, 4, np.random.default_rng(0))
    logits = model(input_ids=batch.ids, use_cache=False).logits
    expected = torch.stack([logits[row, positions] for row, positions in enumerate(batch.positions)])
    torch.testing.assert_close(answers(model, batch), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arm", [MAMBA2, PALIMPSA, PALIMPSA_D])
def test_training_moves_every_parameter_and_repeats_exactly(arm):
    results = []
    for _ in range(2):
        model = build_model(TINY, arm, 0)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        found = train_and_test(model, TINY, seed=0, lr=1e-2, lr_new=1e-2, steps=2, stream=TRAIN, device="cpu")
        still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
        assert still == []
        results.append(without_times(found))
    assert results[0] == results[1]


@pytest.mark.parametrize(("what", "value"), [("loss", float("nan")), ("gradient", 1e30)])
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run(what, value):
    model = build_model(TINY, MAMBA2, 0)
    torch.nn.init.constant_(model.backbone.norm_f.weight, value)
    if what == "gradient":
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        model.backbone.norm_f.weight.register_hook(lambda gradient: gradient / 0)
    with pytest.raises(TrainingError, match=rf"step 1: the {what} is not finite at learning rate 0\.01"):
        train_and_test(model, TINY, seed=0, lr=1e-2, lr_new=1e-2, steps=2, stream=TRAIN, device="cpu")


def test_a_run_holds_what_the_report_needs(out):
    run = json.loads((out / "mqar-palimpsa-lr0.01-seed1.json").read_text())
    assert [record["step"] for record in run["records"]] == [0, 2]
    assert run["records"][0]["importance"].keys() == {"0", "1"}
    assert len(run["records"][-1]["importance"]["1"]["head_ratio"]) == 2
    assert run["test"].keys() == {"8/2", "16/2"}
    assert run["setting"] == json.loads(json.dumps(TINY.of_a_run()))
    assert [len(heads) for heads in run["windows"]["after"].values()] == [2, 2]


def test_the_swapped_arm_starts_where_its_source_ended(out):
    source = mqar.run_name(mqar.NAME, MAMBA2, 0.01, 0)
    for arm in (surgery_recall.UNSWAPPED, surgery_recall.SWAPPED):
        run = json.loads((out / f"surgery_recall-{arm}-lr0.001-seed0.json").read_text())
        end = json.loads((out / f"{run['source']}.json").read_text())["records"][-1]["validation"]
        assert run["records"][0]["validation"] == end
    swapped = surgery_recall.start(TINY, Place(out).models / source, surgery_recall.SWAPPED, 0)
    plain = surgery_recall.start(TINY, Place(out).models / source, surgery_recall.UNSWAPPED, 0)
    batch = recall_batch(Task(16, 3), TINY.vocab, 4, np.random.default_rng(0))
    assert swapped.config.palimpsa_layers == [0, 1]
    torch.testing.assert_close(answers(swapped, batch), answers(plain, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arm", "layers", "groups", "starts_at_source"),
    [
        ("swapped_fast", [0, 1], 4, True),
        ("swapped_first", [0], 4, True),
        ("swapped_per_head", [0, 1], 1, True),
        ("swapped_paper", [0, 1], 4, False),
    ],
)
def test_arms_of_surgery_differ_in_layers_gates_and_start(out, arm, layers, groups, starts_at_source):
    setting = dataclasses.replace(TINY, metaplastic={**TINY.metaplastic, "beta_groups": 4})
    source = Place(out).models / mqar.run_name(mqar.NAME, MAMBA2, 0.01, 0)
    model = surgery_recall.start(setting, source, arm, 0)
    assert (model.config.palimpsa_layers, model.config.beta_groups) == (layers, groups)
    scales = [model.backbone.layers[layer].mixer.metaplasticity.scale() for layer in layers]
    assert (float(torch.cat(scales).max()) < 1e-2) == starts_at_source


def test_what_surgery_added_gets_the_learning_rate_of_the_arm(out, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(surgery_recall, "train_and_test", lambda model, setting, **how: given.append(how) or {})
    for arm in (surgery_recall.UNSWAPPED, surgery_recall.SWAPPED, "swapped_fast"):
        place = Place(tmp_path, work=out)
        found = surgery_recall._train(TINY, place, 0.01, arm, 1e-3, 0, on_record=None)
        assert found["lr_new"] == given[-1]["lr_new"]
    assert [how["lr_new"] for how in given] == pytest.approx([1e-3, 1e-3, 1e-2])


def test_finished_runs_are_not_repeated(out, monkeypatch):
    times = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    missing = out / "mqar-mamba2-lr0.01-seed0.json"
    text = json.loads(missing.read_text())
    missing.unlink()
    mqar.train_all(TINY, Place(out))
    again = json.loads(missing.read_text())
    assert without_times(again) == without_times(text)
    assert all(path.stat().st_mtime_ns == time for path, time in times.items() if path != missing)
    monkeypatch.setattr(mqar, "train_and_test", None)
    mqar.train_all(TINY, Place(out))


def test_a_run_that_is_cut_goes_on_in_another_process_as_if_it_had_not_been(tmp_path, monkeypatch):
    setting = dataclasses.replace(TINY, steps=6, records=3, seeds=(0,))
    mqar.train_all(setting, Place(tmp_path / "whole", workers=1), (PALIMPSA,))
    cut = Place(tmp_path / "cut", until=0.0, work=tmp_path / "work")
    name, seen = "mqar-palimpsa-lr0.01-seed0", []
    with pytest.raises(OutOfTimeError, match=f"{name}: not begun, the time is up"):
        mqar.train_all(setting, cut, (PALIMPSA,))
    clock = iter([-1.0] + [1.0] * 9)
    monkeypatch.setattr(recall_runs.time, "monotonic", lambda: seen.append(next(clock)) or seen[-1])
    with pytest.raises(OutOfTimeError, match=r"step 2 of 6: the time is up; the same command goes on"):
        mqar.train_all(setting, cut, (PALIMPSA,))
    assert [path.name for path in cut.work.iterdir()] == [f"{name}.partial.pt"]
    (known,) = recall_runs.read_partial(cut.out, mqar.NAME)
    assert [path.name for path in cut.out.iterdir()] == [f"{name}.partial.json"]
    assert ([record["step"] for record in known["records"]], known["lr"]) == ([0, 2], 0.01)
    with pytest.raises(UsageError, match="has no run of mqar"):
        recall_runs.read_runs(cut.out, mqar.NAME)
    monkeypatch.undo()
    mqar.train_all(setting, dataclasses.replace(cut, until=math.inf, jobs=2), (PALIMPSA,))
    assert list(cut.work.iterdir()) == []
    assert [path.name for path in cut.out.iterdir()] == [f"{name}.json"]
    runs = [json.loads((tmp_path / x / f"{name}.json").read_text()) for x in ("whole", "cut")]
    assert without_times(runs[0]) == without_times(runs[1])


def test_a_wider_sweep_keeps_the_runs_that_are_done(out, monkeypatch):
    monkeypatch.setattr(mqar, "train_and_test", None)
    with pytest.raises(TypeError):  # the first run that is missing, of the new learning rate
        mqar.train_all(dataclasses.replace(TINY, lrs=(1e-2, 1e-3)), Place(out))
    assert len(list(out.glob("mqar-*.json"))) == 4


def test_the_sweep_gives_both_arms_the_same_and_the_best_rate_every_seed(tmp_path):
    done = []

    def run(unit):
        done.append(unit)
        arm, lr, seed = unit
        accuracy = lr if arm == "a" else 1 - lr
        return {"arm": arm, "lr": lr, "seed": seed, "records": [{"validation": {"8/2": {"accuracy": accuracy}}}]}

    recall_runs.sweep(("a", "b"), (0.1, 0.2), (5, 6, 7), run, Place(tmp_path))
    assert sorted(done[:4]) == [("a", 0.1, 5), ("a", 0.2, 5), ("b", 0.1, 5), ("b", 0.2, 5)]
    assert sorted(done[4:]) == [("a", 0.2, 6), ("a", 0.2, 7), ("b", 0.1, 6), ("b", 0.1, 7)]


def test_a_single_rate_leaves_no_choice_and_all_runs_are_begun_at_once(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(recall_runs, "run_all", lambda units, run, place: begun.append(list(units)))
    recall_runs.sweep(("a", "b"), (0.1,), (5, 6), None, Place(tmp_path))
    assert begun == [[("a", 0.1, 5), ("b", 0.1, 5), ("a", 0.1, 6), ("b", 0.1, 6)]]


def test_runs_of_another_setting_are_refused(out):
    with pytest.raises(UsageError, match=r"mqar-mamba2-lr0\.01-seed0\.json: was made with another setting"):
        mqar.train_all(dataclasses.replace(TINY, steps=3), Place(out))


def test_surgery_without_sources_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no run of mqar; train first"):
        surgery_recall.train_all(TINY, Place(tmp_path))
    with pytest.raises(UsageError, match="run mqar with the same -o first"):
        surgery_recall.start(TINY, tmp_path / "models" / "mqar-mamba2", surgery_recall.SWAPPED, 0)


@pytest.mark.parametrize("experiment", [mqar, surgery_recall], ids=lambda module: module.NAME)
def test_the_command_reports_from_the_files(out, experiment):
    experiment.main(["-o", str(out), "--report"])
    assert (out / f"{experiment.NAME}.md").stat().st_size > 500
    for plot in ("accuracy", "learning", "importance"):
        assert (out / f"{experiment.NAME}-{plot}.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_line_chooses_preset_arms_rates_and_steps(tmp_path):
    asked = []
    arguments = ["--preset", "gpu", "-o", str(tmp_path), "--lrs", "0.1", "0.2", "--steps", "7", "--arms", "c"]
    arguments += ["--state-size", "16", "--jobs", "3", "--workers", "2", "--work", "w"]
    arguments += ["--seeds", "4", "5", "--surgery-steps", "8"]
    for argv in (arguments, ["-o", str(tmp_path), "--device", "cpu"]):
        with pytest.raises(UsageError, match="has no run of x"):
            recall_runs.run_main("x", ("a", "b", "c"), lambda *given: asked.append(given), "about", argv)
    (setting, place, arms), (usual, plain, first_two) = asked
    assert (setting.vocab, setting.lrs, setting.surgery_lrs, setting.steps) == (8192, (0.1, 0.2), (0.1, 0.2), 7)
    assert (place.out, list(arms), plain.device, first_two) == (tmp_path, ["c"], "cpu", ("a", "b"))
    assert (setting.model["state_size"], place.jobs, place.workers, plain.jobs) == (16, 3, 2, 1)
    assert (setting.seeds, setting.surgery_steps, place.models, plain.models.parent) == (
        (4, 5),
        8,
        Path("w", "models"),
        tmp_path,
    )
    assert usual == PRESETS["cpu"]


def test_runs_of_two_settings_are_not_mixed(out, tmp_path):
    for number, name in enumerate(("mqar-mamba2-lr0.01-seed0.json", "mqar-mamba2-lr0.01-seed1.json")):
        run = json.loads((out / name).read_text())
        run["setting"]["steps"] += number
        (tmp_path / name).write_text(json.dumps(run))
    with pytest.raises(UsageError, match="different settings"):
        recall_runs.read_runs(tmp_path, "mqar")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_task_of_a_preset_can_be_drawn(preset):
    setting = PRESETS[preset]
    for task in {*setting.train, *setting.test}:
        recall_batch(task, setting.vocab, 1, np.random.default_rng(0))
    assert all(setting.step_tokens % task.length == 0 for task in setting.train)
    assert len(setting.seeds) == 3
    assert len(setting.lrs) >= 2
