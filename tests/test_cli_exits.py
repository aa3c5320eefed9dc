"""The verbs that a model leaves by: merge, export, push."""

import json
from types import SimpleNamespace

import pytest
from palimpsa_surgery import cli
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.sharing.hub import PushResult
from typer.testing import CliRunner

SOURCE = str(embedded_checkpoint_path())


def invoke(*arguments, code=0):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, f"{result.exit_code}: {result.output} {result.exception!r}"
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exits") / "model"
    invoke("convert", SOURCE, folder, "--layers", "3,", "--verify", "none", "-q")
    return folder


def test_export_and_its_refusal(model, tmp_path):
    assert "wrote" in invoke("export", SOURCE, tmp_path / "plain").stdout
    refused = invoke("export", model, tmp_path / "out", "-q", code=2).stderr
    assert refused.startswith("error: model: has Palimpsa-M layers (3)")
    invoke("export", model, tmp_path / "out", "--off", "-q")
    assert json.loads(invoke("inspect", tmp_path / "out", "--json").stdout)["layout"] == "mamba_ssm"


def test_push_to_a_folder(model, tmp_path):
    invoke("push", model, "alice/model", "--to-folder", tmp_path / "upload", "-q")
    assert "# alice/model" in (tmp_path / "upload" / "README.md").read_text()
    assert "--force" in invoke("push", model, "alice/model", "--to-folder", tmp_path / "upload", "-q", code=2).stderr


def test_push_says_where_the_model_is_and_who_sees_it(model, monkeypatch):
    result = PushResult("alice/m", "https://hub/alice/m", "0" * 40, True, ("config.json",), (), ("left: notes.txt",))
    seen = SimpleNamespace()

    def run(*arguments, **options):
        seen.arguments, seen.options = arguments, options
        return result

    monkeypatch.setattr("palimpsa_surgery.sharing.hub.push", run)
    assert invoke("push", model, "alice/m").stdout == "left: notes.txt\nprivate: https://hub/alice/m\n"
    assert seen.arguments == (str(model), "alice/m")
    assert not seen.options["public"]
    assert not seen.options["force"]
    found = json.loads(invoke("push", model, "alice/m", "--public", "--force", "--json").stdout)
    assert found["repo_id"] == "alice/m"
    assert seen.options["public"]
    assert seen.options["force"]


def test_push_without_a_token_is_one_line(model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    stderr = invoke("push", model, "alice/m", "-q", code=2).stderr
    assert stderr == "error: push needs a Hub token and none is stored; run `hf auth login`, or set HF_TOKEN\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merge", SOURCE, "out"], "holds no adapter"),
        (["push", "absent", "alice/m", "--to-folder", "out"], "absent: no such folder"),
        (["push", SOURCE, "alice/m", "--to-folder", "out"], "its weights are in pytorch_model.bin"),
        (["export", SOURCE, "out", "--layout", "gguf"], "--layout gguf"),
    ],
)
def test_refusals_leave_nothing(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, [*arguments, "-q"])
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
