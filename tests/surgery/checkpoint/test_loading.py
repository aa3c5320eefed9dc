"""Any layout becomes the same running model, and nothing of it is left to chance."""

import dataclasses

import pico
import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.mixers.geometry import keeps_fp32
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer
from safetensors.torch import load_file

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
FP32_NAMES = {"A_log", "dt_bias", "D", "beta_scale", "log_prior"}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("tied", [True, False])
def test_every_layout_gives_the_same_logits(tmp_path, tied):
    sizes = {"tied": tied, "groups": 2, "bias": True}
    writers = {
        "bin": lambda folder: pico.write_mamba_ssm(folder, **sizes),
        "shards": lambda folder: pico.write_hf(folder, shards=3, **sizes),
        "hf bin": lambda folder: pico.write_hf(folder, format="bin", **sizes),
    }
    found = []
    for name, writer in writers.items():
        writer(tmp_path / name)
        found.append(logits(load_model(tmp_path / name, dtype=torch.float32)))
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_codestral_loads(tmp_path):
    pico.write_codestral(tmp_path)
    assert logits(load_model(tmp_path, dtype=torch.float32)).isfinite().all()


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.02, 0.1)])
def test_an_export_of_transformers_gives_the_logits_of_its_own_class(tmp_path, limit):
    """With one group the stock class computes what mamba_ssm does; its config.json spells infinity its own way."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=32,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        state_size=16,
        num_hidden_layers=2,
        vocab_size=40,
        chunk_size=4,
        time_step_limit=limit,
    )
    stock = Mamba2ForCausalLM(config).eval()
    stock.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = stock(IDS, use_cache=False).logits
    found = logits(load_model(tmp_path))
    assert (found - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("swapped", [(), (1,)])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_are_as_asked_and_the_decay_stays_wide(tmp_path, dtype, swapped):
    tensors = pico.write_hf(tmp_path, swapped=swapped)
    model = load_model(tmp_path, dtype=dtype)
    asked = dtype or torch.bfloat16
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, parameter in model.named_parameters():
        kept = name.rsplit(".", 1)[-1] in FP32_NAMES
        assert keeps_fp32(name) == kept
        assert parameter.dtype == (wide if kept else asked), name
        assert torch.equal(parameter, tensors[name].to(parameter.dtype))
    assert model.config.dtype == asked


def test_the_model_is_in_eval_mode_trainable_and_its_own(tmp_path):
    pico.write_hf(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model = load_model(checkpoint)
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        model.backbone.norm_f.weight.zero_()
    assert checkpoint.load("backbone.norm_f.weight").abs().sum() > 0


def test_nothing_is_left_without_memory(tmp_path):
    pico.write_hf(tmp_path, swapped=(0,))
    model = load_model(tmp_path)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("tied", [True, False])
def test_tied_means_one_matrix(tmp_path, tied):
    pico.write_mamba_ssm(tmp_path, tied=tied)
    model = load_model(tmp_path)
    assert (model.lm_head.weight is model.backbone.embeddings.weight) is tied


def test_a_converted_folder_runs_with_its_swapped_layers(tmp_path):
    pico.write_hf(tmp_path, swapped=(1,), dtype=torch.float32)
    model = load_model(tmp_path)
    kinds = [hasattr(layer.mixer, "metaplasticity") for layer in model.backbone.layers]
    assert kinds == [False, True, False]
    assert model.config.palimpsa_layers == [1]
    assert logits(model).isfinite().all()


def test_saved_by_transformers_it_opens_again_to_the_same_bytes(tmp_path):
    tensors = pico.write_hf(tmp_path / "a", swapped=(0, 2), tied=False)
    load_model(tmp_path / "a").save_pretrained(tmp_path / "b")
    again = open_checkpoint(tmp_path / "b")
    assert again.palimpsa_layers == (0, 2)
    for name, tensor in tensors.items():
        assert torch.equal(again.load(name), tensor.to(again.tensors[name].dtype)), name
    load_model(again).save_pretrained(tmp_path / "c")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in "bc")
    assert all(torch.equal(one[name], two[name]) and one[name].dtype == two[name].dtype for name in one | two)


def test_the_generation_config_comes_along(tmp_path):
    pico.write_hf(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 17, "max_new_tokens": 3}')
    assert load_model(tmp_path).generation_config.eos_token_id == 17


def test_a_checkpoint_whose_tensors_are_not_the_models_is_refused(tmp_path):
    pico.write_hf(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    fewer = {name: entry for name, entry in checkpoint.tensors.items() if not name.endswith("norm_f.weight")}
    broken = dataclasses.replace(checkpoint, tensors=fewer)
    with pytest.raises(CheckpointError, match=r"the model and the checkpoint differ .*Missing.*backbone.norm_f.weight"):
        load_model(broken)


def test_the_shared_checkpoint_gives_the_logits_of_mamba_ssm(shared):
    golden = load_file(shared / "golden" / "mamba2-docs-25m-logits.safetensors")
    model = load_model(shared / "checkpoints" / "mamba2-docs-25m", dtype=torch.float32)
    with torch.no_grad():
        found = model(golden["input_ids"].long()).logits[0]
    expected = golden["logits"].float()
    assert (found - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize("slow", [False, True])
def test_a_model_ends_where_its_tokenizer_says(tmp_path, slow):
    pico.write_mamba_ssm(tmp_path, rows=4096, vocab=4093)
    pico.write_tokenizer(tmp_path, slow=slow, eos_token="the", bos_token=None)
    end = load_tokenizer(tmp_path).eos_token_id
    model = load_model(tmp_path)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == end > 0


def test_a_model_whose_tokenizer_cannot_be_read_runs_and_says_so(tmp_path, caplog):
    pico.write_mamba_ssm(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert load_model(tmp_path).config.eos_token_id is None
    assert "does not know which token ends a text" in caplog.text
