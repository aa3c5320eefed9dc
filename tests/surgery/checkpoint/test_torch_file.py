"""Files of torch.save: read where their tensors lie, refused when broken or unsafe."""

import logging
import sys
import zipfile

import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.surgery.checkpoint import torch_file
from palimpsa_surgery.surgery.checkpoint.lazy import open_weights
from palimpsa_surgery.surgery.checkpoint.torch_file import TorchFile


def test_a_torch_file_shares_storage_where_the_model_did(tmp_path):
    shared = torch.randn(4, 4)
    torch.save({"a": shared, "b": shared, "c": shared[2:]}, tmp_path / "m.bin")
    file = open_weights(tmp_path / "m.bin")
    assert file.is_archive
    assert file.tensors["a"].storage == file.tensors["b"].storage != file.tensors["c"].storage
    assert torch.equal(file.load("c"), shared[2:])


def test_the_old_torch_format_loads_with_a_note(tmp_path, caplog):
    tensors = {"a": torch.randn(3)}
    torch.save(tensors, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    with caplog.at_level(logging.WARNING):
        file = TorchFile(tmp_path / "m.bin")
    assert not file.is_archive
    assert torch.equal(file.load("a"), tensors["a"])
    assert "format from before 1.6" in caplog.text


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_a_state_dict_one_level_down(tmp_path, key):
    torch.save({key: {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "m.bin")
    assert list(open_weights(tmp_path / "m.bin").tensors) == ["a"]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (torch.zeros(2), "holds a Tensor, expected a table of tensors"),
        ({"a": torch.zeros(2), "epoch": 3}, "entry 'epoch' is of type int, expected a tensor"),
        ({3: torch.zeros(2)}, "entry 3 is of type Tensor"),
        ({"a": torch.eye(2).to_sparse()}, "tensor a is sparse, quantized or without data"),
    ],
)
def test_a_torch_file_of_anything_else_is_refused(tmp_path, content, match):
    torch.save(content, tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match=match):
        open_weights(tmp_path / "m.bin")


@pytest.mark.parametrize("keep", [10, 300, -1])
def test_a_truncated_torch_file_is_refused(tmp_path, keep):
    path = tmp_path / "m.bin"
    torch.save({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m.bin: cannot be read as a torch file"):
        open_weights(path)


def test_tensors_saved_from_a_gpu_load_without_one(tmp_path):
    """Such a file says `cuda:0` where one saved on a CPU says `cpu`; nothing else differs."""
    tensors = {"a": torch.randn(4, 3), "b": torch.randn(2).bfloat16()}
    torch.save(tensors, tmp_path / "cpu.bin")
    with zipfile.ZipFile(tmp_path / "cpu.bin") as source, zipfile.ZipFile(tmp_path / "gpu.bin", "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("data.pkl"):
                assert b"X\x03\x00\x00\x00cpu" in content
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            target.writestr(name, content)
    file = open_weights(tmp_path / "gpu.bin")
    for name, tensor in tensors.items():
        assert file.load(name).device.type == "cpu"
        assert torch.equal(file.load(name), tensor)


def saved(path, tensor, *, old=False):
    torch.save({"first": torch.zeros(3), "a": tensor}, path, _use_new_zipfile_serialization=not old)
    return TorchFile(path)


@pytest.mark.parametrize(
    ("tensor", "old"),
    [
        (torch.arange(6.0).reshape(2, 3).t(), False),
        (torch.empty(0, 2), False),
        (torch.arange(6.0), True),
        (torch._neg_view(torch.arange(6.0)), False),
    ],
    ids=["not contiguous", "empty", "read into memory", "negated as it is read"],
)
def test_a_tensor_that_lies_in_no_piece_of_the_file_has_no_offset(tmp_path, tensor, old):
    assert saved(tmp_path / "m.bin", tensor, old=old).offset("a") is None


def repack(path, change, *, compression=zipfile.ZIP_STORED):
    """Writes a torch file again, each record as `change(name, content)` gives it."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, change(name.split("/", 1)[1], content))


def test_a_file_of_another_byte_order_is_read_and_has_no_offset(tmp_path):
    path = tmp_path / "m.bin"
    tensor = torch.arange(1.0, 9.0)
    torch.save({"a": tensor}, path)

    def turn(name, content):
        if name == "byteorder":
            return {"little": b"big", "big": b"little"}[sys.byteorder]
        if name.startswith("data/"):
            return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, 4).flip(1).numpy().tobytes()
        return content

    repack(path, turn)
    file = TorchFile(path)
    assert torch.equal(file.load("a"), tensor)
    assert file.offset("a") is None


def test_a_negated_view_is_read_as_its_values(tmp_path):
    file = saved(tmp_path / "m.bin", torch._neg_view(torch.arange(6.0)))
    assert not file.load("a").is_neg()
    assert torch.equal(file.load("a"), -torch.arange(6.0))


def test_a_file_that_was_compressed_is_refused(tmp_path):
    torch.save({"a": torch.ones(100)}, tmp_path / "m.bin")
    repack(tmp_path / "m.bin", lambda name, content: content, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"m\.bin: was packed again with compression"):
        open_weights(tmp_path / "m.bin")


def test_a_tensor_without_data_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="tensor a is sparse, quantized or without data"):
        saved(tmp_path / "m.bin", torch.empty(3, device="meta"))


def test_tensors_lie_where_their_offsets_say(tmp_path):
    tensors = {"a": torch.arange(6.0), "b": torch.arange(20, dtype=torch.int64)[3:7]}
    torch.save(tensors, tmp_path / "m.bin")
    file = TorchFile(tmp_path / "m.bin")
    for name, tensor in tensors.items():
        expected = tensor.numpy().tobytes()
        assert (tmp_path / "m.bin").read_bytes()[file.offset(name) :][: len(expected)] == expected


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[1:3],
        lambda t: t[:, 1:3],
        lambda t: t[::2, ::3],
        lambda t: t[:1].expand(4, 6),
        lambda t: t[2, 3],
        lambda t: torch.nn.Parameter(t),
        lambda t: t.as_strided((3, 3), (1, 1)),
    ],
    ids=["turned", "rows", "columns", "steps", "expanded", "scalar", "parameter", "overlapping"],
)
def test_a_view_of_any_kind_is_read_as_its_values(tmp_path, view):
    whole = torch.arange(24.0).reshape(4, 6)
    expected = view(whole)
    torch.save({"whole": whole, "a": expected}, tmp_path / "m.bin")
    found = TorchFile(tmp_path / "m.bin").load("a")
    assert found.is_contiguous()
    assert torch.equal(found, expected)


# Damage.


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("read", ["whole", "in pieces"])
@pytest.mark.parametrize("name", ["a", "part", "turned"])
def test_a_flipped_bit_of_a_tensor_is_found_by_its_checksum(tmp_path, monkeypatch, name, read):
    monkeypatch.setattr(torch_file, "PIECE_BYTES", 1000)
    shared = torch.arange(4000.0).reshape(2, 2000)
    torch.save({"a": torch.ones(4000), "part": shared[1], "turned": shared.t()}, tmp_path / "m.bin")
    flip(tmp_path / "m.bin", TorchFile(tmp_path / "m.bin").offset("a" if name == "a" else "part") + 7000)
    file = TorchFile(tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match=f"m.bin: the bytes of tensor {name} do not match their checksum"):
        file.contents(name, file.load(name) if read == "whole" else None)


def test_a_file_whose_checksums_were_not_computed_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(4)}, tmp_path / "m.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    assert TorchFile(tmp_path / "m.bin").contents("a").finite


def outcome(path):
    """The values that a file gives, or its refusal; any other error fails the test."""
    try:
        file = TorchFile(path)
        for name in file.tensors:
            file.contents(name)
    except CheckpointError as error:
        return str(error)
    return {name: file.load(name).tolist() for name in file.tensors}


@pytest.mark.parametrize("seed", range(4))
def test_damage_to_the_table_of_the_archive_is_one_sentence_or_of_no_effect(tmp_path, seed):
    path = tmp_path / "m.bin"
    torch.save({f"tensor {number}": torch.full((10,), float(number)) for number in range(5)}, path)
    whole, values = path.read_bytes(), outcome(path)
    random = torch.Generator().manual_seed(seed)
    refused = 0
    for _ in range(40):
        content = bytearray(whole)
        for place in torch.randint(len(whole) - 1200, len(whole), (2,), generator=random).tolist():
            content[place] ^= 1 << int(torch.randint(0, 8, (), generator=random))
        path.write_bytes(content)
        found = outcome(path)
        refused += isinstance(found, str)
        assert found == values or (isinstance(found, str) and "\n" not in found)
    assert refused > 10
