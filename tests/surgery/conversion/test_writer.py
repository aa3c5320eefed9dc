"""The writer against safetensors' own reading, and its refusals."""

import errno
import json
from collections import namedtuple

import pico
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.conversion import writer as writer_module
from palimpsa_surgery.surgery.conversion.writer import TensorSpec, cast, write_tensors
from safetensors import safe_open
from safetensors.torch import load_file

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


def write(folder, tensors):
    return write_tensors(folder, [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in tensors.items()], tensors.get)


def assert_equal(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def mixed():
    tensors = {str(dtype): torch.arange(7).remainder(2).to(dtype) for dtype in DTYPES}
    tensors["matrix"] = torch.randn(3, 5).bfloat16()
    tensors["not contiguous"] = torch.randn(4, 6).t()
    tensors["strided"] = torch.randn(10)[::3]
    tensors["expanded"] = torch.randn(3, 1).expand(3, 4)
    tensors["empty"] = torch.empty(0, 3)
    tensors["scalar"] = torch.tensor(2.5)
    return tensors


def test_the_library_reads_what_was_written(tmp_path):
    tensors = mixed()
    assert write(tmp_path, tensors) == ["model.safetensors"]
    assert_equal(load_file(tmp_path / "model.safetensors"), tensors)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}, "transformers asks for it"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_every_tensor_is_aligned_to_its_own_size(tmp_path):
    tensors = {"u": torch.ones(3, dtype=torch.uint8), "h": torch.ones(5).half(), "d": torch.ones(1).double()}
    write(tmp_path, tensors)
    content = (tmp_path / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for name, tensor in tensors.items():
        assert (start + header[name]["data_offsets"][0]) % tensor.element_size() == 0


@pytest.mark.parametrize(
    ("limit", "counts"),
    [(10**9, [5]), (160, [5]), (159, [4, 1]), (96, [3, 2]), (95, [2, 2, 1]), (32, [1] * 5), (1, [1] * 5)],
)
def test_shards_are_as_full_as_their_limit_lets_them_be(tmp_path, monkeypatch, limit, counts):
    monkeypatch.setattr(writer_module, "MAX_SHARD_BYTES", limit)
    tensors = {f"t{number}": torch.randn(8) for number in range(5)}  # 32 bytes each
    files = write(tmp_path, tensors)
    assert [len(load_file(tmp_path / name)) for name in files] == counts
    merged = {}
    for name in files:
        merged |= load_file(tmp_path / name)
    assert_equal(merged, tensors)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(counts) > 1)
    if len(counts) > 1:
        assert files[0] == f"model-00001-of-{len(counts):05d}.safetensors"
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == 160
        assert all(name in load_file(tmp_path / file) for name, file in content["weight_map"].items())
        assert list(content["weight_map"]) == list(tensors)


def test_no_more_than_a_shard_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_SHARD_BYTES", 64)
    written = []

    def load(name):
        written.append((name, len(list(tmp_path.iterdir()))))
        return torch.zeros(8)

    write_tensors(tmp_path, [TensorSpec(f"t{number}", (8,), torch.float32) for number in range(5)], load)
    assert written == [("t0", 0), ("t1", 0), ("t2", 1), ("t3", 1), ("t4", 2)]


def test_a_shard_that_does_not_reach_the_disk_is_an_error(tmp_path, monkeypatch):
    def flush(path):
        if path.name.startswith("model-00001"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module, "MAX_SHARD_BYTES", 64)
    monkeypatch.setattr(writer_module, "flush", flush)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.*cannot be written \(.*No space left.*free room"):
        write(tmp_path, {f"t{number}": torch.zeros(8) for number in range(4)})


@pytest.mark.parametrize("limit", [10**9, 2000])
def test_a_checkpoint_is_written_and_opens_again(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(writer_module, "MAX_SHARD_BYTES", limit)
    tensors = pico.write_mamba_ssm(tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    pico.write_hf(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    specs = [TensorSpec(entry.name, entry.shape, entry.dtype) for entry in source.tensors.values()]
    write_tensors(tmp_path / "out", specs, source.load)
    copy = open_checkpoint(tmp_path / "out")
    assert list(copy.tensors) == list(source.tensors)
    for name in copy.tensors:
        assert torch.equal(copy.load(name), tensors[name])


def test_a_cast_on_the_way(tmp_path):
    write_tensors(tmp_path, [TensorSpec("a", (3,), torch.float32)], {"a": torch.ones(3).bfloat16()}.get)
    assert_equal(load_file(tmp_path / "model.safetensors"), {"a": torch.ones(3)})


def test_a_cast_that_makes_infinities_is_refused():
    with pytest.raises(CheckpointError, match=r"a: holds values up to 1e\+05, beyond the range of float16"):
        cast("a", torch.tensor([1.0, 1e5]), torch.float16)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor a is \[3\], expected \[2\]"):
        write_tensors(tmp_path, [TensorSpec("a", (2,), torch.float32)], {"a": torch.zeros(3)}.get)


def test_a_disk_too_small_is_known_before_a_byte_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(writer_module.shutil, "disk_usage", lambda path: usage(100, 90, 10))
    with pytest.raises(CheckpointError, match=r"the disk has 10 B free, the model needs 400 B"):
        write(tmp_path, {"a": torch.zeros(100)})
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.fixture
def limit_file_sizes():
    """Sets a limit that stands for a full disk: the system refuses to write beyond it."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [0, 100, 4090])
def test_a_disk_that_fills_up_is_named(tmp_path, limit_file_sizes, limit):
    limit_file_sizes(limit)
    message = r"model.safetensors: cannot be written \(.*File too large.*\), 3.9 KiB are needed"
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path, {name: torch.zeros(500) for name in "ab"})
