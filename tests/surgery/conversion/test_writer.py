"""The streaming writer against safetensors' own reading, and its failures, which leave nothing behind."""

import errno
import json
import os
from collections import namedtuple
from concurrent.futures import wait

import pico
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.weights import Extent
from palimpsa_surgery.surgery.conversion import writer as writer_module
from palimpsa_surgery.surgery.conversion.writer import StreamingSafetensorsWriter, TensorSpec, write_tensors
from safetensors import safe_open
from safetensors.torch import load_file

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


def specs_of(tensors):
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def write(folder, tensors, **options):
    with StreamingSafetensorsWriter(folder, specs_of(tensors), **options) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return writer


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
    writer = write(tmp_path, tensors, metadata={"made_by": "a test"})
    assert writer.files == ["model.safetensors"]
    assert_equal(load_file(tmp_path / "model.safetensors"), tensors)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "made_by": "a test"}
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_every_tensor_is_aligned_to_its_own_size(tmp_path):
    tensors = {"u": torch.ones(3, dtype=torch.uint8), "h": torch.ones(5).half(), "d": torch.ones(1).double()}
    write(tmp_path, tensors)
    content = (tmp_path / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for name, tensor in tensors.items():
        assert (start + header[name]["data_offsets"][0]) % tensor.element_size() == 0


def test_any_order_of_writing_gives_the_same_file(tmp_path):
    tensors = mixed()
    write(tmp_path / "a", tensors)
    with StreamingSafetensorsWriter(tmp_path / "b", specs_of(tensors)) as writer:
        for name in reversed(list(tensors)):
            writer.write(name, tensors[name])
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("limit", "counts"),
    [(10**9, [5]), (160, [5]), (159, [4, 1]), (96, [3, 2]), (95, [2, 2, 1]), (32, [1] * 5), (1, [1] * 5)],
)
def test_shards_are_as_full_as_their_limit_lets_them_be(tmp_path, limit, counts):
    tensors = {f"t{number}": torch.randn(8) for number in range(5)}  # 32 bytes each
    writer = write(tmp_path, tensors, max_shard_size=limit)
    assert [len(load_file(tmp_path / name)) for name in writer.files] == counts
    merged = {}
    for name in writer.files:
        merged |= load_file(tmp_path / name)
    assert_equal(merged, tensors)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(counts) > 1)
    if len(counts) > 1:
        assert writer.files[0] == f"model-00001-of-{len(counts):05d}.safetensors"
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == 160
        assert all(name in load_file(tmp_path / file) for name, file in content["weight_map"].items())
        assert list(content["weight_map"]) == list(tensors)


@pytest.mark.parametrize("limit", [10**9, 2000])
def test_a_checkpoint_streams_from_its_map_and_opens_again(tmp_path, limit):
    tensors = pico.write_mamba_ssm(tmp_path / "source")
    source = open_checkpoint(tmp_path / "source")
    pico.write_hf(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    specs = [TensorSpec(entry.name, entry.shape, entry.dtype) for entry in source.tensors.values()]
    write_tensors(tmp_path / "out", specs, source.load, max_shard_size=limit)
    copy = open_checkpoint(tmp_path / "out")
    assert list(copy.tensors) == list(source.tensors)
    for name in copy.tensors:
        assert torch.equal(copy.load(name), tensors[name])


def test_a_cast_on_the_way(tmp_path):
    write_tensors(tmp_path, [TensorSpec("a", (3,), torch.float32)], {"a": torch.ones(3).bfloat16()}.get)
    assert_equal(load_file(tmp_path / "model.safetensors"), {"a": torch.ones(3)})


def test_no_tensors_is_a_valid_file(tmp_path):
    write(tmp_path, {})
    assert load_file(tmp_path / "model.safetensors") == {}


# Failures.


def assert_nothing_left(folder):
    assert [path.name for path in folder.iterdir()] == []


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("b", torch.zeros(2), "tensor b was not announced"),
        ("a", torch.zeros(3), r"tensor a is \[3\] torch.float32, expected \[2\] torch.float32"),
        ("a", torch.zeros(2).half(), r"tensor a is \[2\] torch.float16, expected \[2\] torch.float32"),
    ],
)
def test_a_tensor_that_was_not_announced_so(tmp_path, name, tensor, match):
    with (
        pytest.raises(CheckpointError, match=match),
        StreamingSafetensorsWriter(tmp_path, [TensorSpec("a", (2,), torch.float32)]) as writer,
    ):
        writer.write(name, tensor)
    assert_nothing_left(tmp_path)


def test_a_tensor_written_twice(tmp_path):
    with (
        pytest.raises(CheckpointError, match="tensor a was written before"),
        StreamingSafetensorsWriter(tmp_path, [TensorSpec("a", (2,), torch.float32)]) as writer,
    ):
        writer.write("a", torch.zeros(2))
        writer.write("a", torch.zeros(2))
    assert_nothing_left(tmp_path)


def test_a_tensor_never_written(tmp_path):
    specs = [TensorSpec("a", (2,), torch.float32), TensorSpec("b", (2,), torch.float32)]
    with (
        pytest.raises(CheckpointError, match=r"1 announced tensors were never written \(b\)"),
        StreamingSafetensorsWriter(tmp_path, specs, max_shard_size=8) as writer,
    ):
        writer.write("a", torch.zeros(2))
    assert_nothing_left(tmp_path)


def test_an_error_in_the_block_leaves_nothing(tmp_path):
    def stop():
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), StreamingSafetensorsWriter(tmp_path, specs_of(mixed())) as writer:
        writer.write("matrix", torch.zeros(3, 5).bfloat16())
        stop()
    assert_nothing_left(tmp_path)


def test_until_the_end_no_file_has_its_name(tmp_path):
    with StreamingSafetensorsWriter(tmp_path, [TensorSpec("a", (2,), torch.float32)]) as writer:
        writer.write("a", torch.zeros(2))
        assert not list(tmp_path.glob("*.safetensors"))
    assert list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("specs", "match"),
    [
        ([TensorSpec("a", (1,), torch.float32)] * 2, "tensor a is announced twice"),
        ([TensorSpec("a", (1,), torch.complex64)], r"safetensors cannot hold torch.complex64"),
    ],
)
def test_specs_that_cannot_be_written(tmp_path, specs, match):
    with pytest.raises(CheckpointError, match=match):
        StreamingSafetensorsWriter(tmp_path / "out", specs)
    assert not (tmp_path / "out").exists()


def test_a_disk_too_small_is_known_before_a_byte_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(writer_module.shutil, "disk_usage", lambda path: usage(100, 90, 10))
    with (
        pytest.raises(CheckpointError, match=r"the disk has 10 B free, the model needs 400 B"),
        StreamingSafetensorsWriter(tmp_path, [TensorSpec("a", (100,), torch.float32)]),
    ):
        pass
    assert_nothing_left(tmp_path)


@pytest.fixture
def limit_file_sizes():
    """Sets a limit that stands for a full disk: the system refuses to write beyond it."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [0, 100, 4090])
def test_a_disk_that_fills_up_leaves_nothing(tmp_path, limit_file_sizes, limit):
    specs = [TensorSpec(name, (500,), torch.float32) for name in "ab"]
    limit_file_sizes(limit)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: cannot be written \(File too large\), 3.9 KiB are needed"
    ):
        write_tensors(tmp_path, specs, lambda name: torch.zeros(500))
    limit_file_sizes(2**40)
    assert_nothing_left(tmp_path)


def test_a_disk_that_fills_up_in_the_middle(tmp_path, limit_file_sizes):
    specs = [TensorSpec(name, (500,), torch.float32) for name in "ab"]
    with (
        pytest.raises(CheckpointError, match=r"cannot be written \(File too large\)"),
        StreamingSafetensorsWriter(tmp_path, specs) as writer,
    ):
        writer.write("a", torch.zeros(500))
        limit_file_sizes(3000)
        writer.write("b", torch.zeros(500))
    limit_file_sizes(2**40)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_flush_that_fails_beside_the_writing_is_not_lost(tmp_path, monkeypatch, failing):
    calls = []

    def flush(handle):
        calls.append(handle)
        if len(calls) == failing:  # the system says it once
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(writer_module, "_FLUSH_BYTES", 40)
    monkeypatch.setattr(os, "fdatasync" if hasattr(os, "fdatasync") else "fsync", flush)
    specs = [TensorSpec(f"t{number}", (100,), torch.float32) for number in range(3)]
    with (
        pytest.raises(CheckpointError, match=r"cannot be written \(Input/output error\)"),
        StreamingSafetensorsWriter(tmp_path, specs) as writer,
    ):
        for spec in specs:
            writer.write(spec.name, torch.zeros(100))
            if writer._flushing is not None:
                wait([writer._flushing])
    assert_nothing_left(tmp_path)


# From file to file.


def copied(folder, source, *, at=5):
    """Writes a tensor whose bytes lie at `at` in a file of the same content; the tensor handed in is another."""
    tensor = torch.arange(1000, dtype=torch.int64)
    source.write_bytes(b"x" * at + tensor.numpy().tobytes() + b"after")
    specs = [TensorSpec("b", (3,), torch.uint8), TensorSpec("a", (1000,), torch.int64)]
    with StreamingSafetensorsWriter(folder, specs) as writer, source.open("rb") as stream:
        writer.write("b", torch.ones(3, dtype=torch.uint8))
        if not writer.copy("a", Extent(source, at, stream.fileno())):
            writer.write("a", torch.zeros_like(tensor))
    return load_file(folder / "model.safetensors")["a"], tensor


@pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="the system cannot copy from file to file")
@pytest.mark.parametrize("at_most", [None, 4096, 1])
def test_bytes_go_from_file_to_file_however_many_the_system_takes(tmp_path, monkeypatch, at_most):
    real = os.copy_file_range

    def some(source, target, count, *offsets):
        return real(source, target, min(count, at_most), *offsets)

    if at_most is not None:
        monkeypatch.setattr(os, "copy_file_range", some)
    found, expected = copied(tmp_path / "out", tmp_path / "source")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, None])
def test_where_the_system_cannot_copy_the_tensor_itself_is_written(tmp_path, monkeypatch, number):
    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    if number is None:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    else:
        monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    found, _ = copied(tmp_path / "out", tmp_path / "source")
    assert torch.equal(found, torch.zeros(1000, dtype=torch.int64))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"cannot be written \(No space left on device\)"),
        (0, "source: became shorter while a was copied from it"),
    ],
    ids=["disk full", "source cut short"],
)
def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch, result, message):
    def fail(*arguments):
        if isinstance(result, OSError):
            raise result
        return result

    monkeypatch.setattr(os, "copy_file_range", fail, raising=False)
    with pytest.raises(CheckpointError, match=message):
        copied(tmp_path / "out", tmp_path / "source")
    assert_nothing_left(tmp_path / "out")
