"""Several processes: the command that starts them, and what two of them give on a CPU."""

import os
import re
import socket
import subprocess
import sys
import traceback

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.recipes.launch import find_config, launch_command, launched_processes, main, shipped_configs
from palimpsa_surgery.recipes.training.finetune import finetune
from palimpsa_surgery.recipes.training.metrics import read_metrics
from palimpsa_surgery.recipes.training.recipe import dump_recipe, load_recipe
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from safetensors.torch import load_file
from sharded import train_sharded

IDS = torch.arange(30).view(1, 30)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("WORLD_SIZE=2", "WORLD_SIZE: set in the environment as by a launcher, but RANK is not; unset it, or start"),
        ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0", "WORLD_SIZE, RANK, LOCAL_RANK: .* but MASTER_ADDR is not; unset them"),
        ("LOCAL_RANK=0", "LOCAL_RANK: set in the environment"),
        ("RANK=1", "RANK: set in the environment"),
        ("WORLD_SIZE=two", "WORLD_SIZE: is 'two' in the environment, expected a whole number"),
    ],
)
def test_what_a_launcher_left_in_the_environment_is_named(model_folder, recipe, tmp_path, monkeypatch, given, message):
    for setting in given.split():
        monkeypatch.setenv(*setting.split("="))
    with pytest.raises(UsageError, match=message):
        finetune(model_folder, recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", ["", "WORLD_SIZE=1", "WORLD_SIZE=1 RANK=0", "MASTER_ADDR=here", "LOCAL_RANK=-1"])
def test_what_says_one_process_is_one_process(monkeypatch, given):
    for setting in given.split():
        monkeypatch.setenv(*setting.split("="))
    assert launched_processes() == 1


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_shipped_configurations_are_read_by_accelerate_and_open_with_their_line(name):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    path = find_config(name)
    config = config_args.load_config_from_file(str(path))
    assert config.mixed_precision == "no"
    assert re.search(
        rf"palimpsa_surgery\.recipes\.launch .*{name} finetune", path.read_text().split("compute_environment")[0]
    )


def test_sharding_wraps_the_block_class_of_the_model(model):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    wrapped = config_args.load_config_from_file(str(find_config("fsdp2"))).fsdp_config[
        "fsdp_transformer_layer_cls_to_wrap"
    ]
    assert {type(block).__name__ for block in model.backbone.layers} == {wrapped}


def test_an_unknown_configuration_names_the_nearest(tmp_path):
    with pytest.raises(UsageError, match="did you mean fsdp2"):
        find_config("fsdp")
    own = tmp_path / "own.yaml"
    own.write_text("")
    assert find_config(own) == own


def test_the_command_passes_on_every_argument():
    command = launch_command("ddp", ["finetune", "M", "lr=1"], processes=16, machines=2, rank=1, address="host")
    assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    assert command[-5:] == ["-m", "palimpsa_surgery", "finetune", "M", "lr=1"]
    for pair in (("--num_processes", "16"), ("--num_machines", "2"), ("--machine_rank", "1")):
        assert command[command.index(pair[0]) + 1] == pair[1]
    assert command[command.index("--main_process_ip") + 1] == "host"


def test_cpu_processes_start_without_mpi():
    command = launch_command("cpu", ["finetune"], processes=4, machines=2, rank=1, address="host")
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert {"--nproc_per_node=2", "--nnodes=2", "--node_rank=1", "--master_addr=host"} <= set(command)
    assert "--standalone" in launch_command("cpu", ["finetune"])


@pytest.mark.parametrize("options", [{"machines": 2}, {"machines": 2, "rank": 2, "address": "host"}])
def test_machines_that_cannot_find_each_other_are_refused(options):
    with pytest.raises(UsageError, match="2 machines need --address"):
        launch_command("ddp", [], **options)


def test_main_replaces_the_process(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    main(["--processes", "3", "cpu", "finetune", "M", "--recipe", "tiny_cpu"])
    assert started == [launch_command("cpu", ["finetune", "M", "--recipe", "tiny_cpu"], processes=3)]


def test_main_says_what_is_wrong(capsys):
    with pytest.raises(SystemExit):
        main(["ddpp"])
    assert "did you mean ddp" in capsys.readouterr().err


@pytest.fixture
def constant(recipe):
    """A schedule without an end, so that a run of two steps is the beginning of one of four."""
    return {**recipe, "schedule": "constant", "warmup": 0, "micro_batch_size": 1, "save_every": 2}


@pytest.mark.slow
def test_two_processes_are_one(model_folder, constant, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.setattr("palimpsa_surgery.modeling.bundle.bundle_remote_code", lambda folder, model_type: ())
    one = finetune(model_folder, constant, tmp_path / "one")
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(load_recipe(constant)))
    arguments = ["finetune", str(model_folder), "--recipe", str(file), "-o", str(tmp_path / "two"), "steps=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        launch_command("cpu", arguments, processes=2), env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("wrote") == 1
    assert done.stderr.count("mode full:") == 1
    resumed = finetune(model_folder, constant, tmp_path / "two", resume=True)
    lines = [read_metrics(tmp_path / run / "metrics.jsonl") for run in ("one", "two")]
    starts = [[(line["step"], line["processes"]) for line in run if line["kind"] == "start"] for run in lines]
    assert starts == [[(0, 1)], [(0, 2), (2, 1)]]
    losses = [[line["loss"] for line in run if line["kind"] == "train"] for run in lines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # fp32, summed in another order
    validation = [[line["loss"] for line in run if line["kind"] == "validation"] for run in lines]
    assert validation[0][0] == pytest.approx(validation[1][0], rel=1e-5)
    names = load_file(one.final / "model.safetensors").keys()
    assert load_file(resumed.final / "model.safetensors").keys() == names
    logits = [load_model(run.final)(input_ids=IDS).logits for run in (one, resumed)]
    assert (logits[0] - logits[1]).norm() <= 1e-4 * logits[0].norm()


def in_two_processes(work):
    """Forks, with what a launcher sets: a process that is started anew imports everything again."""
    state = pytest.importorskip("accelerate.state")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    children = []
    for rank in ("0", "1"):
        children.append(os.fork())
        if not children[-1]:
            code = 1
            try:
                os.environ |= address | {"RANK": rank, "LOCAL_RANK": rank}
                state.AcceleratorState._reset_state(reset_partial_state=True)  # that of one process
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_sharded_model_trains_resumes_and_is_saved_as_one(model_folder, constant, tmp_path, monkeypatch):
    monkeypatch.setattr("palimpsa_surgery.modeling.bundle.bundle_remote_code", lambda folder, model_type: ())
    constant = {**constant, "steps": 3, "save_every": 1, "eval_every": 1, "keep": 3}
    one = finetune(model_folder, constant, tmp_path / "one")
    file, out = tmp_path / "recipe.yaml", tmp_path / "two"
    file.write_text(dump_recipe(load_recipe(constant)))
    in_two_processes(lambda: train_sharded(model_folder, file, out))
    found = load_file(out / "final" / "model.safetensors")
    for name, tensor in load_file(one.final / "model.safetensors").items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)  # fp32, in another order
    for step in (1, 2, 3):  # each was written after a validation, and holds the optimizer's state of every parameter
        stored = [
            load_file(run / "checkpoints" / f"step-{step}" / "training.safetensors") for run in (tmp_path / "one", out)
        ]
        assert stored[0].keys() == stored[1].keys()
    lines = [line for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "train"]
    reference = [line for line in read_metrics(tmp_path / "one" / "metrics.jsonl") if line["kind"] == "train"]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in lines[:3]] == pytest.approx([line[key] for line in reference], rel=1e-4)
