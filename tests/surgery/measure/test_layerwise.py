"""Measuring from files, a layer at a time: the figures of the whole model, and what is in memory meanwhile."""

import numpy as np
import pico
import pytest
import tiny
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.surgery.checkpoint import weights
from palimpsa_surgery.surgery.checkpoint.checkpoint import Checkpoint, open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.families.registry import mixers
from palimpsa_surgery.surgery.measure import layerwise
from palimpsa_surgery.surgery.measure.forgetting import ForgettingSums, _watching, measure_forgetting
from palimpsa_surgery.surgery.measure.layerwise import LayerFiles, run_by_layer

WRITERS = {
    "mamba_ssm .bin": pico.write_mamba_ssm,
    "transformers": pico.write_hf,
    "converted": lambda folder: tiny.make_model(layers=(1,), vocab_size=29).save_pretrained(folder),
}


def texts(*lengths, vocabulary=29):
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocabulary, length) for length in lengths]


@pytest.fixture
def checkpoint(tmp_path):
    pico.write_mamba_ssm(tmp_path / "source")
    return open_checkpoint(tmp_path / "source")


def on_meta(model):
    return all(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def by_whole_passes(model, batches):
    """The figures of a model in memory that runs as it always does, a batch after the other."""
    found = mixers(model)
    sums = {layer: ForgettingSums(mixer, calibrate=True) for layer, mixer in found.items()}
    with _watching(found, sums):
        for batch in batches:
            model(input_ids=torch.as_tensor(np.stack(batch)), use_cache=False)
    return [sums[layer].result(layer) for layer in found]


@pytest.mark.parametrize("kind", [*WRITERS, "embedded"])
def test_figures_are_those_of_whole_passes_to_the_bit(kind, tmp_path):
    if kind != "embedded":
        WRITERS[kind](tmp_path / "source")
    checkpoint = open_checkpoint(embedded_checkpoint_path() if kind == "embedded" else tmp_path / "source")
    sequences = texts(70, 70, 9, 70)
    files = LayerFiles(checkpoint)
    model = load_model(checkpoint, dtype=torch.float32)
    expected = by_whole_passes(model, [sequences[2:3], sequences[:2], sequences[3:]])
    assert measure_forgetting(files.model, sequences, files=files) == expected
    assert measure_forgetting(model, sequences) == expected


@pytest.mark.gpu
def test_figures_on_a_gpu_are_those_of_the_cpu():
    checkpoint = open_checkpoint(embedded_checkpoint_path())
    found = []
    for device in ("cpu", "cuda"):
        files = LayerFiles(checkpoint, device)
        found.append(measure_forgetting(files.model, texts(300, 300, 300, vocabulary=4093), files=files))
    for cpu, gpu in zip(*found, strict=True):
        assert gpu.head_rate == pytest.approx(cpu.head_rate, rel=1e-4)  # fp32
        assert gpu.calibration.input_rms == pytest.approx(cpu.calibration.input_rms, rel=1e-4)


def test_one_layer_is_in_memory_at_a_time(checkpoint):
    files = LayerFiles(checkpoint)
    layers = list(files.model.get_decoder().layers)
    seen = []

    def look(layer, *_):
        seen.append([number for number, other in enumerate(layers) if not on_meta(other)])

    for layer in layers:
        layer.mixer.register_forward_hook(look)
    run_by_layer(files.model, texts(8, 8, 8), batch_size=2, last=2, files=files)
    assert seen == [[0], [0], [1], [1], [2], [2]]
    assert on_meta(files.model)


def test_the_run_ends_after_the_last_layer_that_is_watched(checkpoint):
    files = LayerFiles(checkpoint)
    ran, seen = [], []
    files.model.get_decoder().layers[2].register_forward_hook(lambda *_: seen.append(2))
    run_by_layer(files.model, texts(8, 8, 8), batch_size=2, last=1, files=files, ran=ran.append)
    assert ran == [2, 1] * 2
    assert not seen


@pytest.mark.parametrize(("sequences", "times"), [(4, 1), (3, 2), (2, 2), (1, 4)])
def test_weights_are_read_once_for_as_much_text_as_memory_holds(checkpoint, monkeypatch, sequences, times):
    loaded = []
    load = Checkpoint.load
    monkeypatch.setattr(Checkpoint, "load", lambda self, name: loaded.append(name) or load(self, name))
    monkeypatch.setattr(layerwise, "TEXT_BYTES", sequences * 8 * 16 * 4)
    files = LayerFiles(checkpoint)
    batch_size = min(sequences, 2)
    measured = measure_forgetting(files.model, texts(8, 8, 8, 8), batch_size=batch_size, files=files)
    in_layers = [name for name in checkpoint.tensors if ".layers." in name]
    assert sorted(loaded) == sorted(in_layers * times)
    whole = load_model(checkpoint, dtype=torch.float32)
    assert measured == measure_forgetting(whole, texts(8, 8, 8, 8), batch_size=batch_size)


@pytest.mark.parametrize("piece", [6, 32, 40, 2**22])
def test_rows_of_the_embedding_are_read_wherever_a_piece_of_the_file_ends(checkpoint, monkeypatch, piece):
    monkeypatch.setattr(weights, "PIECE_BYTES", piece)
    files = LayerFiles(checkpoint)
    ids = np.array([[3, 28, 0], [28, 17, 3]])
    whole = checkpoint.load("backbone.embeddings.weight").float()
    with files.embedding(ids) as rows:
        embedded = files.model.get_input_embeddings()(torch.as_tensor(rows))
        assert torch.equal(embedded, whole[torch.as_tensor(ids)])
        assert files.model.get_input_embeddings().weight.shape[0] == 4
    assert on_meta(files.model)


def test_a_model_is_as_it_was_even_after_an_error(checkpoint):
    files = LayerFiles(checkpoint)
    layers = files.model.get_decoder().layers
    embedding = files.model.get_input_embeddings()

    def broken(*_):
        raise RuntimeError("out of memory")

    hook = layers[1].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_by_layer(files.model, texts(8), batch_size=1, last=2, files=files)
    hook.remove()
    layers[1].mixer.register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_by_layer(files.model, texts(8), batch_size=1, last=2, files=files)
    assert on_meta(files.model)
    assert files.model.get_input_embeddings() is embedding
    assert not any("forward" in vars(layer) for layer in layers)


def test_a_forward_that_someone_else_put_there_stays(checkpoint):
    model = load_model(checkpoint, dtype=torch.float32)
    layer = model.get_decoder().layers[0]
    calls, forward = [], layer.forward

    def counted(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    layer.forward = counted
    run_by_layer(model, texts(8, 8), batch_size=1, last=2)
    assert layer.forward is counted
    assert len(calls) == 2


def test_damaged_values_are_named_as_they_are_read(tmp_path):
    def damage(tensors):
        tensors["backbone.layers.1.mixer.in_proj.weight"][0, 0] = float("nan")
        return tensors

    pico.write_mamba_ssm(tmp_path / "source", edit=damage)
    files = LayerFiles(open_checkpoint(tmp_path / "source"))
    with pytest.raises(
        CheckpointError, match=r"pytorch_model.bin: tensor .*layers.1.mixer.in_proj.weight holds values"
    ):
        measure_forgetting(files.model, texts(8), files=files)
    assert on_meta(files.model)
