"""What the README tells a reader to type works as written: its commands run here, in order, on fewer tokens."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from palimpsa_surgery import cli
from palimpsa_surgery.recipes.training.recipe import load_recipe
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Less of everything, so that the whole page runs in about a minute.
SMALLER = {
    "measure": ["--tokens", "2048", "--seq-len", "512"],
    "finetune": ["steps=2", "data.seq_len=64", "batch_size=2", "eval_windows=2", "save_every=0"],
    "generate": ["--max-new-tokens", "4"],
    "evaluate": ["--tokens", "512", "--lengths", "64,128", "--trials", "1"],
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("palimpsa ")]


def needs_the_hub(command: list[str]) -> bool:
    published = any(name in command[1].lower() for name in ("2.7b", "falcon"))
    return published or (command[0] == "push" and "--to-folder" not in command)


def names(command: list[str]) -> str:
    return " ".join(command)


LOCAL = [command for command in commands() if not needs_the_hub(command)]
REMOTE = [command for command in commands() if needs_the_hub(command)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Path:
    """The folder a reader works in; the commands and programs below run in it one after the other."""
    return tmp_path_factory.mktemp("reader")


def test_the_page_has_what_is_tested_here():
    assert len(README.splitlines()) < 250
    assert {command[0] for command in LOCAL} >= {
        "inspect",
        "measure",
        "plan",
        "convert",
        "finetune",
        "generate",
        "push",
    }
    assert REMOTE
    assert len(blocks("python")) == 2


@pytest.mark.slow
def test_every_command_runs_as_written(reader, monkeypatch):
    monkeypatch.chdir(reader)
    for command in LOCAL:
        result = CliRunner().invoke(cli.app, [*command, *SMALLER.get(command[0], [])])
        assert result.exit_code == 0, f"{names(command)}: {result.output}"
    assert (reader / "upload" / "README.md").is_file()


@pytest.mark.parametrize("command", REMOTE, ids=names)
def test_commands_that_need_the_hub_are_understood(command):
    verb = typer.main.get_command(cli.app).commands[command[0]]
    context = verb.make_context("palimpsa", command[1:])
    assert context.params
    if command[0] == "finetune":
        assert load_recipe(context.params["recipe"], context.params["overrides"]).data.train == "my-text.jsonl.gz"


def test_the_program_with_this_package_runs(reader, monkeypatch):
    monkeypatch.chdir(reader)
    exec(compile(blocks("python")[0], "README.md", "exec"), {})
    assert (reader / "converted-in-python" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_program_without_this_package_runs(reader, monkeypatch):
    monkeypatch.chdir(reader)
    if not (reader / "converted").is_dir():
        CliRunner().invoke(cli.app, ["convert", "embedded:mamba2-docs-1m", "converted", "--layers", "3,", "-q"])
    environment = {**os.environ, "HF_MODULES_CACHE": str(reader / "modules")}
    command = [sys.executable, "-c", blocks("python")[1]]
    result = subprocess.run(command, cwd=reader, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "[y/N]" not in result.stdout + result.stderr, "transformers asks a person before it goes on"


@pytest.mark.parametrize("block", [block for block in blocks("bash") if "venv" in block])
def test_the_blocks_that_install_are_consistent(block):
    install, run = block.splitlines()[1:3]
    assert install.startswith(".venv/bin/pip install")
    assert run.split()[0].removeprefix(".venv/bin/") in ("palimpsa", "pytest")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_ci_is_a_valid_script():
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=False).returncode == 0
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
