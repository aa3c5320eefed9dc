"""Which files of a folder are the weights, and what is fetched from the Hub. Nothing here uses a network."""

import json
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pico
import pytest
from huggingface_hub import errors as hub
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.sources import (
    read_foreign_json,
    resolve,
    select_weights,
    special_token_ids,
    weight_files,
)

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["model.safetensors.index.json", *SHARDS, "consolidated.safetensors"], ["model.safetensors.index.json"]),
        (["model.safetensors.index.json", "model.safetensors", *SHARDS], ["model.safetensors"]),
        ([*SHARDS], list(SHARDS)),
        (["consolidated.safetensors", "params.json"], ["consolidated.safetensors"]),
        (["consolidated.safetensors", "pytorch_model.bin"], ["pytorch_model.bin"]),
        (["pytorch_model.bin.index.json", "pytorch_model-1.bin"], ["pytorch_model.bin.index.json"]),
        (["weights.safetensors"], ["weights.safetensors"]),
        (["model.pt", "optimizer.pt", "scheduler.pt"], ["model.pt"]),
        (["training_args.bin", "optimizer.bin", "rng_state.pth"], []),
        (["adapter_model.safetensors"], []),
        (["sub/model.safetensors", ".model.safetensors"], []),
        ([], []),
    ],
)
def test_the_precedence_of_weight_files(names, chosen):
    assert list(select_weights(names)) == chosen
    assert list(select_weights(reversed(names))) == chosen


@pytest.mark.parametrize("name", ["./no/where", "/no/where", "a/b/c", "~/nowhere/x", "with space"])
def test_what_cannot_be_a_hub_id_is_a_missing_folder(name):
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve(name)


def test_an_existing_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    source = resolve("org/name")
    assert (source.hub, source.source_id) == (False, "name")


def test_the_embedded_checkpoint_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("embedded:mamba2-docs-1m")
    assert (checkpoint.source_id, checkpoint.layout) == ("mamba2-docs-1m", "mamba_ssm")


def test_the_id_of_a_relative_folder_is_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(".").source_id == tmp_path.name


class FakeHub:
    """A repository on a Hub that is a folder here."""

    def __init__(self, monkeypatch, folder: Path, *, listing=None, download=None):
        self.patterns, self.arguments = None, {}
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        self.api = Mock()
        self.api.list_repo_files.side_effect = listing
        self.api.list_repo_files.return_value = names

        def snapshot_download(repo, **arguments):
            if download is not None:
                raise download
            self.arguments = arguments
            self.patterns = arguments["allow_patterns"]
            return str(folder)

        def api(token=None):
            self.token = token
            return self.api

        monkeypatch.setattr(huggingface_hub, "HfApi", api)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_a_hub_id_opens_and_names_itself(tmp_path, monkeypatch):
    tensors = pico.write_hf(tmp_path / "snapshot")
    fake = FakeHub(monkeypatch, tmp_path / "snapshot")
    checkpoint = open_checkpoint("org/model", revision="v1", token="secret")
    assert (checkpoint.source_id, checkpoint.base_model) == ("org/model", "org/model")
    assert len(checkpoint.tensors) == len(tensors) - 1
    assert (fake.arguments["revision"], fake.arguments["token"], fake.token) == ("v1", "secret", "secret")
    assert fake.arguments["local_files_only"] is False
    assert "secret" not in repr(checkpoint)


@pytest.mark.parametrize(
    ("names", "fetched", "left"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"], ["pytorch_model.bin"]),
        (
            ["model.safetensors.index.json", *SHARDS, "consolidated.safetensors"],
            ["model.safetensors.index.json", *SHARDS],
            ["consolidated.safetensors"],
        ),
        (
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin", "flax_model.msgpack"],
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"],
            ["flax_model.msgpack"],
        ),
    ],
)
def test_only_one_form_of_the_weights_is_fetched(tmp_path, monkeypatch, names, fetched, left):
    from fnmatch import fnmatch

    for name in [*names, "config.json", "tokenizer.json", "README.md", "image.png"]:
        (tmp_path / name).touch()
    fake = FakeHub(monkeypatch, tmp_path)
    resolve("org/model")

    def wanted(name):
        return any(fnmatch(name, pattern) for pattern in fake.patterns)

    assert all(wanted(name) for name in [*fetched, "config.json", "tokenizer.json", "README.md"])
    assert not any(wanted(name) for name in [*left, "image.png"])


@pytest.mark.parametrize("offline", [hub.OfflineModeIsEnabled("off"), ConnectionError("no route")])
def test_offline_uses_the_cache(tmp_path, monkeypatch, offline):
    pico.write_hf(tmp_path)
    fake = FakeHub(monkeypatch, tmp_path, listing=offline)
    assert open_checkpoint("org/model").source_id == "org/model"
    assert fake.arguments["local_files_only"] is True
    assert fake.patterns is None


def response(kind, status=404):
    import httpx

    return kind(
        "sentence one\nsentence two", response=httpx.Response(status, request=httpx.Request("GET", "http://hub"))
    )


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (response(hub.RepositoryNotFoundError), "neither a folder here nor a model on the Hub that you may read"),
        (response(hub.RevisionNotFoundError), "has no revision 'v9' on the Hub"),
        (response(hub.GatedRepoError, 403), "is gated on the Hub; accept its terms"),
        (response(hub.HfHubHTTPError, 500), r"at revision v9: the download failed \(HfHubHTTPError: sentence one\)"),
        (hub.LocalEntryNotFoundError("x"), "not in the Hub cache, and the Hub cannot be reached"),
        (hub.HFValidationError("bad id"), "neither a folder here nor a model on the Hub"),
    ],
)
@pytest.mark.parametrize("where", ["listing", "download"])
def test_every_failure_of_the_hub_is_one_line(tmp_path, monkeypatch, error, match, where):
    FakeHub(monkeypatch, tmp_path, **{where: error})
    with pytest.raises(CheckpointError, match=match) as caught:
        resolve("org/model", revision="v9")
    assert "\n" not in str(caught.value)
    assert "org/model" in str(caught.value)


def test_a_cached_snapshot_opens_offline_through_the_real_client(tmp_path, monkeypatch):
    commit = "0" * 40
    repo = tmp_path / "models--org--model"
    tensors = pico.write_hf(repo / "snapshots" / commit, shards=2)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    blobs = repo / "blobs"
    blobs.mkdir()
    for path in (repo / "snapshots" / commit).iterdir():  # the cache holds links to blobs outside the folder
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert len(open_checkpoint("org/model").tensors) == len(tensors) - 1
    with pytest.raises(CheckpointError, match=r"org/other: no such folder here, not in the Hub cache"):
        open_checkpoint("org/other")
    gone = min(blobs.glob("*.safetensors"))
    gone.unlink()
    for name in ("org/model", repo / "snapshots" / commit):
        with pytest.raises(CheckpointError, match=f"{commit}/{gone.name}: is a link to a file that is gone; remove it"):
            open_checkpoint(name)


@pytest.mark.parametrize("single", ["model.safetensors", "pytorch_model.bin"])
def test_a_single_file_beside_shards_is_ambiguous(tmp_path, monkeypatch, single):
    shards = [single.replace(".", f"-0000{number}-of-00002.") for number in (1, 2)]
    for name in (single, *shards):
        (tmp_path / name).touch()
    (tmp_path / f"{single}.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    match = rf"holds {single} and 2 shards \({shards[0]} \.\.\.\), which are two sets of weights; remove the one"
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(tmp_path)
    FakeHub(monkeypatch, tmp_path)
    with pytest.raises(CheckpointError, match=f"org/model: {match}"):
        open_checkpoint("org/model")


def test_an_index_of_the_single_file_itself_is_not_ambiguous(tmp_path):
    tensors = pico.write_hf(tmp_path)
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]


def test_a_mark_that_editors_on_windows_put_first_is_read_over(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}')
    assert read_foreign_json(tmp_path / "config.json") == {"a": 1}


def test_a_home_that_cannot_be_written_names_the_variable(tmp_path, monkeypatch):
    FakeHub(monkeypatch, tmp_path, download=PermissionError(13, "Permission denied", "/home/x"))
    with pytest.raises(CheckpointError, match=r"Permission denied.*; name a folder .* in HF_HOME"):
        resolve("org/model")


@pytest.mark.parametrize("settings", [{}, {"eos_token": "<gone>"}, {"eos_token": None}])
def test_no_token_id_is_invented(tmp_path, settings):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 1, "content": "<a>"}]}))
    assert special_token_ids(tmp_path) == {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert special_token_ids(tmp_path) == {}
