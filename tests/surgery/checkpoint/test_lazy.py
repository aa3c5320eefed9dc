"""Weight files: read without memory, refused when broken."""

import json
import os
import struct
import zlib
from pathlib import Path

import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.surgery.checkpoint import weights
from palimpsa_surgery.surgery.checkpoint.lazy import _DTYPES, SafetensorsFile, open_weights
from safetensors.torch import save_file


def write_safetensors(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", list(_DTYPES.values()), ids=str)
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


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(4)}, path)
    before = path.read_bytes()
    file = SafetensorsFile(path)
    file.load("a").fill_(1.0)
    assert path.read_bytes() == before
    assert torch.equal(file.load("a"), torch.zeros(4))


def test_unaligned_data_is_read_too(tmp_path):
    values = torch.tensor([1.5, -2.0])
    data = b"\x07" + values.numpy().tobytes()
    header = {"u": entry([1], 0, 1, "U8"), "f": entry([2], 1, 9)}
    file = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", header, data))
    assert torch.equal(file.load("f"), values)


ONE = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [%s]}'
TWICE = b"{" + ONE + b", " + ONE + b"}"


@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        (b"{nonsense", b"", "invalid JSON"),
        (b"[1, 2]", b"", "invalid type: sequence"),
        ({"a": 3}, b"", "invalid type: integer `3`"),
        ({"a": {"dtype": "F32"}}, b"", "missing field `shape`"),
        ({"a": entry([2], 0, 8, "C64")}, bytes(8), "invalid shape, data type, or offset"),
        ({"a": entry([2], 0, 4)}, bytes(8), "invalid shape, data type, or offset"),
        ({"a": entry([-2, -1], 0, 8)}, bytes(8), "integer `-2`"),
        ({"a": entry([2], 0, 8)}, bytes(7), "not fully covered.*it may be cut short"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12), "invalid offset for tensor `b`"),
        ({"a": entry([2], 0, 8)}, bytes(11), "not fully covered"),
        ({"a": entry([2], 4, 12)}, bytes(12), "invalid offset for tensor `a`"),
        ({"a": entry([2.0], 0, 8)}, bytes(8), "floating point `2.0`"),
        ({"a": entry([2], 0, 8), "__metadata__": ["pt"]}, bytes(8), "invalid type: sequence"),
        ({"a": entry([2], 0, 8), "__metadata__": {"format": 1}}, bytes(8), "invalid type: integer `1`"),
        (b'{"a": {}, "a": {}}', b"", "missing field"),
        (TWICE % (b"0, 4", b"4, 8"), bytes(8), "invalid offset for tensor `a`"),
    ],
)
def test_a_broken_header_is_refused(tmp_path, header, data, match):
    path = write_safetensors(tmp_path / "m.safetensors", header, data)
    with pytest.raises(CheckpointError, match=rf"m.safetensors: is not a valid safetensors file \(.*{match}"):
        SafetensorsFile(path)


def test_a_dtype_that_torch_has_not_is_named(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"a": entry([2], 0, 1, "F4")}, bytes(1))
    with pytest.raises(CheckpointError, match=r"m.safetensors: tensor a has dtype F4, which is not supported"):
        SafetensorsFile(path)


def test_a_name_that_is_there_twice_is_one_tensor_or_refused(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", TWICE % (b"0, 4", b"0, 4"), bytes(4))
    assert torch.equal(SafetensorsFile(path).load("a"), torch.zeros(1))


@pytest.mark.parametrize("keep", [4, 8, 20, 200])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m.safetensors: is not a valid safetensors file .*it may be cut short"):
        open_weights(path)


def test_random_bytes_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="header too large"):
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


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory the way Linux does")
@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_opening_and_looking_take_no_memory_of_the_size_of_the_tensors(tmp_path, suffix):
    size = 2**26
    path = tmp_path / f"m.{suffix}"
    tensors = {"a": torch.ones(size // 4)}
    save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)
    del tensors
    before = anonymous_bytes()
    file = open_weights(path)
    assert file.contents("a").finite
    assert anonymous_bytes() - before < size // 4


@pytest.mark.parametrize("shape", ["[1e999]", "[" + "9" * 5000 + "]"])
def test_numbers_that_are_none_in_a_header_are_refused(tmp_path, shape):
    header = b'{"a": {"dtype": "F32", "shape": ' + shape.encode() + b', "data_offsets": [0, 4]}}'
    with pytest.raises(CheckpointError, match="is not a valid safetensors file"):
        open_weights(write_safetensors(tmp_path / "m.safetensors", header, b"0000"))


# What happens to a file while it is read.


def written(path, tensors):
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return open_weights(path)


@pytest.mark.parametrize("name", ["m.bin", "m.safetensors"])
@pytest.mark.parametrize("read", ["load", "contents"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, 300), "became shorter while it was read"),
        (lambda path: os.truncate(path, 0), "became shorter while it was read"),
        (lambda path: os.utime(path, ns=(0, 0)), "was written to while it was read"),
    ],
    ids=["cut short", "emptied", "written to"],
)
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, name, read, change, message):
    file = written(tmp_path / name, {"a": torch.ones(5000)})
    change(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: {message}"):
        getattr(file, read)("a")


@pytest.mark.parametrize("name", ["m.bin", "m.safetensors"])
def test_a_file_that_is_overwritten_while_its_last_tensor_is_read_is_refused(tmp_path, monkeypatch, name):
    file = written(tmp_path / name, {"a": torch.ones(5000)})
    original = weights.WeightsFile._read_at

    def read_at(self, view, offset):
        count = original(self, view[: max(1, len(view) // 2)], offset)
        os.utime(tmp_path / name, ns=(0, 0))
        return count

    monkeypatch.setattr(weights.WeightsFile, "_read_at", read_at)
    with pytest.raises(CheckpointError, match=f"{name}: was written to while it was read"):
        file.load("a")


@pytest.mark.parametrize("name", ["m.bin", "m.safetensors"])
@pytest.mark.parametrize("change", [Path.unlink, lambda path: os.replace(path.with_name("other"), path)])
def test_a_file_that_was_deleted_or_replaced_is_read_to_its_end(tmp_path, name, change):
    (tmp_path / "other").write_bytes(b"another file")
    tensor = torch.arange(5000.0)
    file = written(tmp_path / name, {"a": tensor})
    change(tmp_path / name)
    assert torch.equal(file.load("a"), tensor)


# What the values of a tensor say.


@pytest.mark.parametrize("name", ["m.bin", "m.safetensors"])
@pytest.mark.parametrize("size", [0, 1, 999, 3000])
def test_the_contents_are_those_of_the_values_however_they_are_read(tmp_path, monkeypatch, name, size):
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    tensor = torch.arange(1.0, size + 1.0)
    expected = (zlib.crc32(tensor.numpy().tobytes()), True)
    assert written(tmp_path / name, {"a": tensor}).contents("a") == expected
    file = written(tmp_path / name, {"a": tensor})
    assert file.contents("a", file.load("a")) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1500, 2999])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(tmp_path, monkeypatch, dtype, value, place):
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    tensor = torch.zeros(3000, dtype=dtype)
    tensor[place] = value
    assert not written(tmp_path / "m.safetensors", {"a": tensor}).contents("a").finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_largest_numbers_are_finite_though_their_sum_is_not(tmp_path, dtype):
    tensor = torch.full((3000,), torch.finfo(dtype).max, dtype=dtype)
    assert written(tmp_path / "m.safetensors", {"a": tensor}).contents("a").finite
