"""What the script that shards on CPUs sets is what the launcher sets on GPUs."""

import fsdp_on_cpu
import pytest
from palimpsa_surgery.recipes.launch import find_config


def test_the_environment_is_that_of_the_launcher():
    launch = pytest.importorskip("accelerate.commands.launch")
    prepare = pytest.importorskip("accelerate.utils.launch").prepare_multi_gpu_env
    arguments = ["--config_file", str(find_config("fsdp2")), "-m", "palimpsa_surgery"]
    parsed, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(arguments))
    expected = prepare(parsed)
    for name, value in fsdp_on_cpu.environment().items():
        assert (name, expected.get(name)) == (name, value)


def test_processes_on_cpus_are_counted_as_accelerators(monkeypatch):
    state = pytest.importorskip("accelerate.state")

    class State:
        def __init__(self, cpu=False):
            self.distributed_type = state.DistributedType.MULTI_CPU if cpu else state.DistributedType.NO

    monkeypatch.setattr(state, "PartialState", State)
    fsdp_on_cpu.allow_cpu()
    assert State(cpu=True).distributed_type == state.DistributedType.MULTI_GPU
    assert State().distributed_type == state.DistributedType.NO
