"""Publishing, with the real Hub client against a Hub on this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading

import hub_server
import pico
import pytest
import torch
from hub_server import TOKEN
from huggingface_hub import ModelCard, constants
from palimpsa_surgery import cli
from palimpsa_surgery.base.errors import CheckpointError, HubError, OutputExistsError, PalimpsaError, UsageError
from palimpsa_surgery.sharing import hub
from palimpsa_surgery.sharing.hub import push, push_to_folder
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.conversion.convert import convert
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

REPO = "alice/my-model.v1"
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture
def server(monkeypatch, tmp_path):
    with hub_server.for_the_client(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A converted model whose source has a license; layer 1 is swapped."""
    folder = tmp_path_factory.mktemp("hub")
    pico.write_mamba_ssm(folder / "source", tied=False)
    (folder / "source" / "README.md").write_text(
        "---\nlicense: other\nlicense_name: odd\nbase_model: bob/base\n---\nhi\n"
    )
    convert(folder / "source", folder / "model", layers=(1,), init="paper", verify="layers")
    return folder / "model"


@pytest.fixture
def sharded(tmp_path):
    """Three shards and their index, as a large model has; nothing but config and weights."""
    pico.write_hf(tmp_path / "sharded", swapped=(1,), shards=3)
    return tmp_path / "sharded"


@pytest.mark.parametrize(("target", "here", "kept"), [("", ".", "sharded"), ("work", "work/here", "here")])
def test_a_folder_to_push_to_replaces_neither_the_model_nor_the_folder_of_work(
    sharded, tmp_path, monkeypatch, target, here, kept
):
    (tmp_path / "work" / "here").mkdir(parents=True)
    (tmp_path / "work" / "mine.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path / here)
    with pytest.raises(OutputExistsError, match=f"replacing this would delete {kept}, which is in use"):
        push_to_folder(sharded, REPO, tmp_path / target, force=True)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputExistsError, match=r"replacing it would delete here, mine\.txt; choose another output"):
        push_to_folder(sharded, REPO, tmp_path / "work", force=True)
    assert sorted(tmp_path.rglob("*")) == before


def other_process(code, home, server):
    """Runs code where this package, triton, numba and the like cannot be imported, with an empty cache."""
    block = """
    import sys, importlib.abc
    class Absent(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name.split(".")[0] in ("palimpsa_surgery", "triton", "mamba_ssm", "causal_conv1d", "numba"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Absent())
    """
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": server.address,
        "HF_HOME": str(home / "elsewhere"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(block) + textwrap.dedent(code)],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_what_is_pushed_loads_elsewhere_and_generates_the_same_tokens(server, model, tmp_path):
    server.part_size = 4096  # the weights go in parts
    result = push(model, REPO)
    assert result.private
    assert server.repositories[REPO].private
    assert server.count("PUT", r"/large/\w+/\d+") > 2
    code = f"""
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("{REPO}", trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    tokens = model.generate(torch.tensor({IDS.tolist()}), max_new_tokens=12, do_sample=False)
    print("tokens", tokens[0].tolist())
    """
    done = other_process(code, tmp_path, server)
    assert done.returncode == 0, done.stderr[-2000:]
    ours = load_model(model).generate(IDS, max_new_tokens=12, do_sample=False)[0].tolist()
    assert f"tokens {ours}" in done.stdout


def test_what_is_pushed_is_the_source_of_another_surgery(server, model, tmp_path):
    push(model, REPO)
    found = open_checkpoint(REPO)
    assert found.fingerprint == open_checkpoint(model).fingerprint
    assert (found.base_model, found.license) == (REPO, "other")
    ours = AutoModelForCausalLM.from_pretrained(REPO, dtype=torch.float32)
    assert type(ours).__module__.startswith("palimpsa_surgery."), "with the package, its own class and no flag"
    assert torch.equal(ours(IDS).logits, load_model(model, dtype=torch.float32)(IDS).logits)
    report = convert(REPO, tmp_path / "again", layers=(2,), beta_rank=found.config.gate.rank, **shared(found))
    assert report.palimpsa_layers == (1, 2)
    assert f"base_model: {REPO}" in (tmp_path / "again" / "README.md").read_text()


def shared(checkpoint):
    """The keys that all swapped layers of a model have in common."""
    return {
        "init": "paper",
        "verify": "layers",
        "beta_groups": checkpoint.config.gate.groups,
        "beta_scale_form": checkpoint.config.gate.scale_form,
        "train_prior": checkpoint.config.gate.train_prior,
    }


def test_a_repository_is_public_only_when_asked(server, sharded):
    assert not push(sharded, REPO, public=True).private
    again = push(sharded, REPO)
    assert again.notes == ("the repository exists and is public",)
    push(sharded, "alice/second")
    assert "stays so" in push(sharded, "alice/second", public=True).notes[0]


def test_an_upload_that_stopped_goes_on_where_it_was(server, sharded):
    shards = sorted(sharded.glob("*.safetensors"))
    done = []

    def refuse(method, path):
        if method == "PUT" and done:
            return 403
        done.extend([path] if method == "PUT" else [])
        return None

    server.refuse = refuse
    with pytest.raises(HubError, match=r"the upload stopped .*403.*; push again, what arrived is not sent twice"):
        push(sharded, REPO)
    assert list(server.repositories[REPO].files) == [".gitattributes"], "no half of a model"
    assert len(server.large) == 1
    server.refuse = lambda method, path: None
    server.requests.clear()
    push(sharded, REPO)
    assert server.count("PUT", "/large/") == len(shards) - 1
    for path in shards:
        assert server.repositories[REPO].files[path.name].data == path.read_bytes()
        assert server.repositories[REPO].files[path.name].lfs
    commits = len(server.repositories[REPO].commits)
    server.requests.clear()
    push(sharded, REPO)
    assert len(server.repositories[REPO].commits) == commits, "nothing has changed"
    assert server.count("PUT", "/large/") == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # the server's thread stays here
def test_a_push_that_was_killed_goes_on_where_it_was(server, sharded):
    arrived, killed, first = threading.Event(), threading.Event(), []

    def hang(method, path):
        if method == "PUT" and first:
            arrived.set()
            killed.wait(120)
        first.extend([path] if method == "PUT" else [])

    server.refuse = hang
    child = os.fork()
    if not child:
        try:
            push(sharded, REPO)
        finally:
            os._exit(1)
    try:
        assert arrived.wait(120)
    finally:
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the push ended by itself"
        killed.set()
    assert list(server.repositories[REPO].files) == [".gitattributes"]
    server.refuse = lambda method, path: None
    done = CliRunner().invoke(cli.app, ["push", str(sharded), REPO])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"private: {server.address}/{REPO}\n"
    assert sum(path == first[0] for _, path in server.requests) == 1, "the first shard was sent once"
    assert open_checkpoint(REPO).fingerprint


def test_a_new_version_removes_the_shards_of_the_old_one(server, sharded, tmp_path):
    push(sharded, REPO)
    pico.write_hf(tmp_path / "whole", swapped=(1,), seed=1)
    result = push(tmp_path / "whole", REPO)
    assert len(result.removed) == 4
    weights = [name for name in server.repositories[REPO].files if "safetensors" in name]
    assert weights == ["model.safetensors"]


def test_another_model_is_replaced_only_when_told(server, sharded, tmp_path):
    push(sharded, REPO)
    before = dict(server.repositories[REPO].files)
    pico.write_hf(tmp_path / "other", swapped=(0, 1))
    with pytest.raises(UsageError, match=r"alice/my-model.v1: holds another model already .*--force"):
        push(tmp_path / "other", REPO)
    assert server.repositories[REPO].files == before
    result = push(tmp_path / "other", REPO, force=True)
    assert "model.safetensors.index.json" in result.removed
    assert json.loads(server.text(REPO, "config.json"))["palimpsa_layers"] == [0, 1]


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "config.json"])
def test_a_model_of_another_kind_is_another_model(server, sharded, name):
    server.repositories[REPO] = hub_server.Repository(private=True)
    server.repositories[REPO].commit({name: hub_server.Blob(b"{not json", lfs=False)})
    with pytest.raises(UsageError, match="holds another model"):
        push(sharded, REPO)
    push(sharded, REPO, force=True)
    assert server.repositories[REPO].files.get(name) != hub_server.Blob(b"{not json", lfs=False)


def test_the_same_sizes_from_another_source_are_another_model(server, model, tmp_path):
    push(model, REPO)
    pico.write_mamba_ssm(tmp_path / "source", tied=False, seed=3)
    convert(tmp_path / "source", tmp_path / "model", layers=(1,), init="paper", verify="layers")
    with pytest.raises(UsageError, match="holds another model"):
        push(tmp_path / "model", REPO)


def test_a_readme_that_a_user_wrote_there_stays(server, sharded):
    server.repositories[REPO] = hub_server.Repository(private=True)
    mine = hub_server.Blob(b"---\nlicense: mit\n---\nmy words\n", lfs=False)
    server.repositories[REPO].commit({"README.md": mine})
    result = push(sharded, REPO, force=True)
    assert server.repositories[REPO].files["README.md"] == mine
    assert "stays as it is" in result.notes[-1]
    assert "README.md" not in result.files


def test_a_commit_of_somebody_else_in_between_is_not_lost(server, sharded):
    push(sharded, REPO)
    (sharded / "generation_config.json").write_text('{"max_new_tokens": 7}')

    def race(method, path):
        if path.endswith("/commit/main"):
            repository = server.repositories[REPO]
            repository.commit({**repository.files, "notes.md": hub_server.Blob(b"new", lfs=False)})
        return None

    server.refuse = race
    with pytest.raises(HubError, match=r"changed meanwhile .*push again"):
        push(sharded, REPO)
    server.refuse = lambda method, path: None
    push(sharded, REPO)
    assert server.text(REPO, "notes.md") == "new"


def test_a_bare_name_is_the_owners(server, sharded):
    assert push(sharded, "model").repo_id == "alice/model"


def test_no_token_is_one_line(server, sharded, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="needs a Hub token and none is stored; run `hf auth login`"):
        push(sharded, REPO)
    assert not server.requests


@pytest.mark.parametrize(
    ("repo", "token", "error", "message"),
    [
        (REPO, "hf_" + "b" * 34, HubError, "does not accept the token"),
        ("model", "hf_" + "b" * 34, HubError, "does not accept the token"),
        ("bob/model", TOKEN, HubError, "may not write there"),
        ("alice/a/b", TOKEN, UsageError, "no name of a repository, expected owner/name"),
        ("alice/--", TOKEN, UsageError, "no name of a repository"),
    ],
)
def test_refusals_are_one_line_without_the_token(server, sharded, repo, token, error, message):
    with pytest.raises(error, match=message) as caught:
        push(sharded, repo, token=token)
    assert token not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_that_is_not_there_is_one_line(server, sharded, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="the upload stopped"):
        push(sharded, REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="offline mode is on"):
        push(sharded, REPO)


def test_a_model_that_does_not_exist_is_one_line(server):
    with pytest.raises(CheckpointError, match="alice/nothing: neither a folder here nor a model on the Hub") as caught:
        open_checkpoint("alice/nothing")
    assert "\n" not in str(caught.value)


def test_somebody_elses_private_model_is_not_readable(server, sharded, monkeypatch):
    push(sharded, REPO)
    monkeypatch.setitem(server.tokens, "hf_" + "c" * 34, "carol")
    with pytest.raises(CheckpointError, match="that you may read"):
        open_checkpoint(REPO, token="hf_" + "c" * 34)
    assert open_checkpoint(REPO).palimpsa_layers == (1,)


def test_the_folder_is_what_is_uploaded(server, model, tmp_path):
    push(model, REPO)
    target = push_to_folder(model, REPO, tmp_path / "folder")
    there = {name: blob.data for name, blob in server.repositories[REPO].files.items() if name != ".gitattributes"}
    assert {path.name: path.read_bytes() for path in target.iterdir()} == there
    assert (target / "model.safetensors").stat().st_ino == (model / "model.safetensors").stat().st_ino
    card = ModelCard.load(target / "README.md")
    assert (card.data.base_model, card.data.license, card.data.license_name) == ("bob/base", "other", "odd")
    assert f'from_pretrained("{REPO}", trust_remote_code=True)' in card.text


def test_weights_are_copied_where_they_cannot_be_linked(model, tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.hardlink_to", lambda *arguments: (_ for _ in ()).throw(OSError("no links")))
    target = push_to_folder(model, REPO, tmp_path / "folder")
    assert (target / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_bars_are_for_terminals(monkeypatch):
    from huggingface_hub.utils import are_progress_bars_disabled

    before = are_progress_bars_disabled()
    with hub._progress():
        assert are_progress_bars_disabled()
    assert are_progress_bars_disabled() == before


@pytest.mark.parametrize("to_folder", [True, False])
@pytest.mark.parametrize("change", ["replaced", "weights", "gone"])
def test_a_model_that_changes_during_a_push_is_not_mixed_with_another(
    model, server, tmp_path, monkeypatch, change, to_folder
):
    mine, other, prepare = tmp_path / "mine", tmp_path / "other", hub.prepare_upload
    shutil.copytree(model, mine)
    shutil.copytree(model, other)

    def slowly(*given, **options):
        upload = prepare(*given, **options)
        if change == "weights":
            (other / "model.safetensors").rename(mine / "model.safetensors")
        else:
            mine.rename(tmp_path / "aside")
        if change == "replaced":
            other.rename(mine)
        return upload

    monkeypatch.setattr(hub, "prepare_upload", slowly)
    message = "cannot be read|the upload stopped" if change == "gone" else "was written to or replaced during the push"
    with pytest.raises(PalimpsaError, match=message):
        if to_folder:
            push_to_folder(mine, REPO, tmp_path / "target")
        else:
            push(mine, REPO)
    assert not (tmp_path / "target").exists()
    assert REPO not in server.repositories or "model.safetensors" not in server.repositories[REPO].files
