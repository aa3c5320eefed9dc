"""Weight files: read without memory, refused when broken."""

import json
import logging
import struct
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.surgery.lazy import SAFETENSORS_DTYPES, SafetensorsFile, TorchFile, open_weights
from safetensors.torch import save_file


def write_safetensors(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", list(SAFETENSORS_DTYPES.values()), ids=str)
def test_every_dtype_reads_as_the_library_wrote_it(tmp_path, dtype):
    bits = torch.randint(0, 2 if dtype == torch.bool else 127, (3 * 5 * dtype.itemsize,), dtype=torch.uint8)
    tensors = {"a": bits.view(dtype).reshape(3, 5), "scalar": torch.ones((), dtype=dtype), "none": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "m.safetensors")
    file = open_weights(tmp_path / "m.safetensors")
    assert set(file.tensors) == set(tensors)
    for name, tensor in tensors.items():
        loaded = file.load(name)
        assert (loaded.shape, loaded.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(loaded.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_loaded_tensor_is_a_view_and_writing_to_it_leaves_the_file_alone(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    before = path.read_bytes()
    file = SafetensorsFile(path)
    file.load("a").fill_(1.0)
    assert path.read_bytes() == before
    assert torch.equal(file.load("a"), torch.ones(4))  # the same memory: nothing was copied


def test_unaligned_data_is_read_too(tmp_path):
    values = torch.tensor([1.5, -2.0])
    data = b"\x07" + values.numpy().tobytes()
    header = {"u": entry([1], 0, 1, "U8"), "f": entry([2], 1, 9)}
    file = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", header, data))
    assert torch.equal(file.load("f"), values)


@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        (b"{nonsense", b"", "its header is not JSON"),
        (b"[1, 2]", b"", "its header is not a table of tensors"),
        ({"a": 3}, b"", "the header's entry for 'a' is malformed"),
        ({"a": {"dtype": "F32"}}, b"", "the header's entry for 'a' is malformed"),
        ({"a": entry([2], 0, 8, "F4")}, bytes(8), "tensor a has dtype F4, which is not supported"),
        ({"a": entry([2], 0, 4)}, bytes(8), r"the bytes of 'a' do not fit its shape \[2\]"),
        ({"a": entry([-2, -1], 0, 8)}, bytes(8), "do not fit its shape"),
        ({"a": entry([2], 0, 8)}, bytes(7), r"is cut short, tensor a ends at byte \d+ of a file of \d+"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12), "the tensors 'a' and 'b' overlap"),
    ],
)
def test_a_broken_header_is_refused(tmp_path, header, data, match):
    path = write_safetensors(tmp_path / "m.safetensors", header, data)
    with pytest.raises(CheckpointError, match=rf"m.safetensors: .*{match}"):
        SafetensorsFile(path)


@pytest.mark.parametrize("keep", [4, 8, 20, 200])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m.safetensors: (is cut short|is not a valid safetensors file)"):
        open_weights(path)


def test_random_bytes_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="it does not begin with the length of a header"):
        open_weights(path)


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin"])
def test_empty_files_and_pointers_are_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is empty"):
        open_weights(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="is a Git LFS pointer, not the weights"):
        open_weights(path)


def test_a_torch_file_shares_storage_where_the_model_did(tmp_path):
    shared = torch.randn(4, 4)
    torch.save({"a": shared, "b": shared, "c": shared[2:]}, tmp_path / "m.bin")
    file = open_weights(tmp_path / "m.bin")
    assert file.mapped
    assert file.tensors["a"].storage == file.tensors["b"].storage != file.tensors["c"].storage
    assert torch.equal(file.load("c"), shared[2:])


def test_the_old_torch_format_loads_with_a_note(tmp_path, caplog):
    tensors = {"a": torch.randn(3)}
    torch.save(tensors, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    with caplog.at_level(logging.WARNING):
        file = TorchFile(tmp_path / "m.bin")
    assert not file.mapped
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
        ({"a": torch.eye(2).to_sparse()}, "tensor a is sparse, quantised or without data"),
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


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory the way Linux does")
@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_opening_and_reading_takes_no_anonymous_memory(tmp_path, suffix):
    size = 2**26
    path = tmp_path / f"m.{suffix}"
    tensors = {"a": torch.ones(size // 4)}
    save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)
    del tensors
    before = anonymous_bytes()
    file = open_weights(path)
    tensor = file.load("a")
    assert tensor.sum().item() == size // 4
    assert anonymous_bytes() - before < size // 4


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


def torch_file(path, tensor, *, old=False):
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
    assert torch_file(tmp_path / "m.bin", tensor, old=old).offset("a") is None


def test_a_file_that_was_replaced_since_has_no_offset(tmp_path):
    path = tmp_path / "m.bin"
    file = torch_file(path, torch.ones(4))
    torch.save({"other": torch.zeros(100)}, tmp_path / "new.bin")
    (tmp_path / "new.bin").replace(path)
    assert file.offset("a") is None
    assert torch.equal(file.load("a"), torch.ones(4))


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
    file = torch_file(tmp_path / "m.bin", torch._neg_view(torch.arange(6.0)))
    assert not file.load("a").is_neg()
    assert torch.equal(file.load("a"), -torch.arange(6.0))


def test_a_file_that_was_compressed_is_refused(tmp_path):
    torch.save({"a": torch.ones(100)}, tmp_path / "m.bin")
    repack(tmp_path / "m.bin", lambda name, content: content, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"m\.bin: was packed again with compression"):
        open_weights(tmp_path / "m.bin")


@pytest.mark.parametrize("name", ["a b", "a\nb", "a\rb", "a\x0cb", "a\x85b", "a\u2028b"])
def test_an_offset_is_found_below_any_name(tmp_path, name):
    (tmp_path / name).mkdir()
    tensor = torch.arange(6.0)
    path = tmp_path / name / "m.bin"
    offset = torch_file(path, tensor).offset("a")
    expected = tensor.numpy().tobytes()
    assert offset is None or path.read_bytes()[offset : offset + len(expected)] == expected


def test_a_tensor_without_data_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="tensor a is sparse, quantised or without data"):
        torch_file(tmp_path / "m.bin", torch.empty(3, device="meta"))


@pytest.mark.parametrize("shape", ["[1e999]", "[" + "9" * 5000 + "]"])
def test_numbers_that_are_none_in_a_header_are_refused(tmp_path, shape):
    header = b'{"a": {"dtype": "F32", "shape": ' + shape.encode() + b', "data_offsets": [0, 4]}}'
    with pytest.raises(CheckpointError, match="is not a valid safetensors file"):
        open_weights(write_safetensors(tmp_path / "m.safetensors", header, b"0000"))
