"""The same command on several processes: `accelerate launch` with a configuration that is shipped, or with your own.

    python -m palimpsa_surgery.recipes.launch --processes 8 fsdp2 finetune MODEL --recipe NAME -o RUN

On several machines the same line runs on each, with `--machines N --rank 0..N-1 --address HOST_OF_RANK_0`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..base.errors import PalimpsaError, UsageError
from ..base.files import load_yaml

CONFIGS = Path(__file__).parent / "accelerate"
PORT = 29_500
_LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells each of its processes."""


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the accelerate configurations that come with the package."""
    return {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}


def find_config(name_or_file: str | Path) -> Path:
    """The file of an accelerate configuration: a path, or the name of a shipped one.

    Raises:
        UsageError: it is neither; the message names the nearest.
    """
    path, shipped = Path(name_or_file), shipped_configs()
    if path.is_file():
        return path
    if str(name_or_file) in shipped:
        return shipped[str(name_or_file)]
    near = difflib.get_close_matches(str(name_or_file), shipped, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"shipped are {', '.join(shipped)}"
    raise UsageError(f"accelerate configuration {str(name_or_file)!r}: is neither a file nor shipped; {hint}")


def launched_processes() -> int:
    """How many processes a launcher has started for this run, this one included; 1 without a launcher.

    Raises:
        UsageError: some of a launcher's variables are set and others are not, as an earlier session leaves them.
    """
    given = {name: os.environ[name] for name in _LAUNCHER if os.environ.get(name)}
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        if not given.get(name, "0").removeprefix("-").isdecimal():
            raise UsageError(f"{name}: is {given[name]!r} in the environment, expected a whole number; unset it")
    processes = int(given.get("WORLD_SIZE", 1))
    missing = [name for name in _LAUNCHER if name not in given]
    if missing and (processes > 1 or int(given.get("RANK", 0)) > 0 or int(given.get("LOCAL_RANK", -1)) >= 0):
        raise UsageError(
            f"{', '.join(given)}: set in the environment as by a launcher, but {missing[0]} is not; unset "
            f"{'it' if len(given) == 1 else 'them'}, or start the run with python -m palimpsa_surgery.recipes.launch"
        )
    return processes


def launch_command(
    config: str | Path,
    arguments: Sequence[str],
    *,
    processes: int | None = None,
    machines: int = 1,
    rank: int = 0,
    address: str | None = None,
) -> list[str]:
    """The command that runs `palimpsa ARGUMENTS` on every process.

    Args:
        config: see `find_config`.
        arguments: of `palimpsa`, beginning with the verb.
        processes: in all, over all machines; by default what the configuration says.
        machines: how many machines take part.
        rank: which of them this is.
        address: host name of the machine of rank 0.

    Raises:
        UsageError: several machines without an address, or a rank that does not exist.
    """
    path = find_config(config)
    settings = load_yaml(path)
    target = ["-m", "palimpsa_surgery", *arguments]
    if machines > 1 and (address is None or not 0 <= rank < machines):
        raise UsageError(
            f"launch: {machines} machines need --address (the host of rank 0) and --rank from 0 to {machines - 1}"
        )
    if settings.get("use_cpu"):  # accelerate starts several CPU processes only through MPI; torch's launcher needs none
        count = (processes or settings["num_processes"]) // machines
        where = [f"--nnodes={machines}", f"--node_rank={rank}", f"--master_addr={address}", f"--master_port={PORT}"]
        shape = [f"--nproc_per_node={count}", *(where if machines > 1 else ["--standalone"])]
        return [sys.executable, "-m", "torch.distributed.run", *shape, *target]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    if processes is not None:
        command += ["--num_processes", str(processes)]
    if machines > 1:
        command += ["--num_machines", str(machines), "--machine_rank", str(rank)]
        command += ["--main_process_ip", address, "--main_process_port", str(PORT)]
    return [*command, *target]


def main(argv: Sequence[str] | None = None) -> None:
    """Replaces this process by `accelerate launch`."""
    parser = argparse.ArgumentParser(prog="python -m palimpsa_surgery.recipes.launch", description=__doc__)
    parser.add_argument("config", help=f"one of {', '.join(shipped_configs())}, or a file")
    parser.add_argument("--processes", type=int, help="in all, over all machines")
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help="of this machine")
    parser.add_argument("--address", help="host name of the machine of rank 0")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="of palimpsa, such as: finetune MODEL --recipe NAME"
    )
    given = parser.parse_args(argv)
    try:
        command = launch_command(
            given.config,
            given.arguments,
            processes=given.processes,
            machines=given.machines,
            rank=given.rank,
            address=given.address,
        )
    except PalimpsaError as error:
        parser.error(str(error))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
