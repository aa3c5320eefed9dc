"""One process and two: commands, distances of curves, and the verdict; the runs themselves are stubs."""

import csv
import json

import pytest
import torch
import two_gpus
from launched import LaunchError
from two_gpus import AGAIN, DDP, FSDP, ONE, Bench, Report, apart

FACTS = {"device": "none", "date": "today", "commit": "abc", "torch": "2", "what": "a model", "command": "python x"}


def write_run(folder, losses, *, starts=((0, 1),), logits=1.0):
    """A finished run as its files, with logits that were already taken."""
    (folder / "final").mkdir(parents=True)
    (folder / "final" / "config.json").write_text("{}")
    lines = [{"kind": "start", "step": step, "processes": count} for step, count in starts]
    for step, loss in enumerate(losses, 1):
        lines.append(
            {"kind": "train", "step": step, "loss": loss, "tokens_per_second": 10.0 * step, "memory_bytes": 2e9}
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    torch.save(torch.full((4,), logits), folder / "logits.pt")


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path / "model", tmp_path / "recipe.yaml", tmp_path, cpu=False, timeout=1)


def test_commands_go_through_the_launcher():
    ddp = DDP.command(["finetune", "M"], cpu=False)
    assert ddp[-4:] == ["-m", "palimpsa_surgery", "finetune", "M"]
    assert ddp[ddp.index("--num_processes") + 1] == "2"
    sharded = FSDP.command(["finetune", "M"], cpu=True)
    assert sharded[1:3] == ["-m", "torch.distributed.run"]
    assert sharded[-3].endswith("fsdp_on_cpu.py")
    assert "palimpsa_surgery" not in sharded


def test_curves_are_compared_step_by_step():
    assert apart({1: 1.0, 2: 2.0, 3: 3.0}, {1: 9.0, 2: 2.5, 3: 3.25}, after=1) == (0.5, 0.375)
    with pytest.raises(LaunchError, match="of 1 and 2 steps cannot be compared"):
        apart({1: 1.0}, {1: 1.0, 2: 2.0})


@pytest.mark.parametrize(("off", "logits", "verdict"), [(3e-4, 1.0, "yes"), (5e-4, 1.0, "NO"), (0.0, 1.01, "NO")])
def test_the_limit_is_what_one_process_gives(bench, off, logits, verdict):
    write_run(bench.folder(ONE.name), [3.0, 2.0, 1.0])
    write_run(bench.folder(AGAIN.name), [3.0, 2.0001, 1.0])
    write_run(bench.folder(DDP.name), [3.0, 2.0 + off, 1.0], logits=logits)
    report = Report(bench, FACTS, "no")
    report.add(DDP.name, 2)
    with (bench.out / "two_gpus.csv").open() as stream:
        (row,) = csv.DictReader(stream)
    assert (row["same run"], row["tokens/s"], row["times one"]) == (verdict, "30", "1.00")
    assert row["peak GB a process"] == "2.00"
    assert "| ddp-2 | 2 |" in (bench.out / "two_gpus.md").read_text()


def test_a_resumed_run_is_compared_from_where_it_went_on(bench, monkeypatch):
    write_run(bench.folder(ONE.name), [3.0, 2.0, 1.0])
    write_run(bench.folder(AGAIN.name), [3.0, 2.0, 1.0])
    calls = []

    def run(self, setup, name, *changes, resume=False, kill_at=None):
        calls.append((setup.name, resume, kill_at, changes))
        if resume:
            write_run(self.folder(name), [7.0, 2.0, 1.0], starts=((0, 2), (1, 1)))
        return resume

    monkeypatch.setattr(Bench, "run", run)
    name, step = bench.kill_and_resume(DDP, ONE, 2)
    assert bench.kill_and_resume(DDP, ONE, 2) == (name, step) == ("ddp-2 killed, one resumes", 1)
    saving = ("save_every=1", "eval_every=1", "keep=3")
    assert calls == [("ddp-2", False, 2, saving), ("one", True, None, saving)]
    report = Report(bench, FACTS, "no")
    report.add(name, 1, after=step)
    assert report.rows[0]["same run"] == "yes"


def test_a_run_that_ends_before_the_kill_is_no_result(bench, monkeypatch):
    monkeypatch.setattr(Bench, "run", lambda *arguments, **options: True)
    with pytest.raises(LaunchError, match="ended before it could be killed; give more --steps"):
        bench.kill_and_resume(ONE, DDP, 2)


def test_a_checkpoint_is_waited_for(tmp_path):
    folder = tmp_path / "checkpoints" / "step-4"
    folder.mkdir(parents=True)
    assert not two_gpus._reached(tmp_path, 3)
    (folder / "state.json").write_text("{}")
    assert two_gpus._reached(tmp_path, 4)
    assert not two_gpus._reached(tmp_path, 5)


def test_saved_logits_are_those_of_the_folder(tiny_folder, tmp_path):
    (tmp_path / "final").symlink_to(tiny_folder)
    first = two_gpus.logits(tmp_path, "cpu")
    assert first.shape == (1, 96, 4000)
    assert two_gpus.relative(two_gpus.logits(tmp_path, "cpu"), first) == 0
    assert two_gpus.relative(first * 1.5, first) == pytest.approx(0.5)


def test_without_two_gpus_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="needs two CUDA devices and found 1"):
        two_gpus.main(["model", "-o", str(tmp_path)])


def test_a_shape_needs_no_model():
    options = two_gpus.parse(["--shape", "tiny", "-o", "out", "data.seq_len=8", "lr=1"])
    assert (options.model, options.changes) == (None, ["data.seq_len=8", "lr=1"])


@pytest.mark.parametrize(("size", "other"), [(1, 2), (2, 1), (8, 4), (3, 1)])
def test_the_measure_of_noise_takes_other_micro_batches(size, other):
    assert two_gpus.other_micro_batch(size) == other
