"""What trainers and collators do to a model."""

import math

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.kernels.common.kept import kept
from palimpsa_surgery.kernels.metaplastic.scan import ScanOutput, ScanState, metaplastic_scan
from palimpsa_surgery.mixers import mixer as mixer_palimpsa_mamba2
from palimpsa_surgery.modeling import metaplasticity_off
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments


def gradients(model, **inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_changes_no_gradient_and_turns_the_cache_off(lively_model, ids, rel, reentrant):
    model = lively_model().train()
    expected = gradients(model, input_ids=ids, labels=ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert all(block.gradient_checkpointing for block in model.backbone.layers)
    actual = gradients(model, input_ids=ids, labels=ids, use_cache=True)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert rel(actual[name], gradient) < 1e-5, name
    assert model(ids, use_cache=True).cache is None
    with torch.no_grad():
        assert model(ids, use_cache=True).cache is not None, "generation from a model in training keeps its cache"


class OnceScan(torch.autograd.Function):
    """A scan like those on GPUs: its backward needs its inputs only. Counts how often its forward runs."""

    runs = 0

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return kept(lambda: OnceScan._run(*inputs))

    @staticmethod
    def _run(*inputs):
        OnceScan.runs += 1
        result = metaplastic_scan(*inputs)
        return result.output, *result.state

    @staticmethod
    def backward(ctx, do, dM, dJ):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            result = metaplastic_scan(*leaves)
            return torch.autograd.grad((result.output, *result.state), leaves, (do, dM, dJ))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_runs_a_scan_once(lively_model, ids, rel, reentrant, monkeypatch):
    def scan(*inputs, backend, **nothing):
        assert not any(x is not None for x in nothing.values())
        return ScanOutput((found := OnceScan.apply(*inputs))[0], ScanState(*found[1:]), None)

    monkeypatch.setattr(OnceScan, "runs", 0)
    monkeypatch.setattr(mixer_palimpsa_mamba2, "metaplastic_scan", scan)
    model = lively_model().train()
    expected = gradients(model, input_ids=ids, labels=ids)
    scans, OnceScan.runs = OnceScan.runs, 0
    assert scans == len(model.config.palimpsa_layers)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    actual = gradients(model, input_ids=ids, labels=ids)
    assert scans == OnceScan.runs
    for name, gradient in expected.items():
        assert rel(actual[name], gradient) < 1e-5, name


def test_every_parameter_gets_a_gradient(lively_model, ids):
    model = lively_model().train()
    found = gradients(model, input_ids=ids, labels=ids)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, gradient in found.items():
        assert gradient.abs().max() > 0, name


def test_loss_is_the_shifted_cross_entropy(lively_model, ids, rel):
    model = lively_model()
    labels = ids.clone()
    labels[0, :9] = -100
    output = model(ids, labels=labels)
    logits, targets = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100)
    assert rel(output.loss, expected) < 1e-6
    total = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    assert rel(model(ids, labels=labels, num_items_in_batch=11).loss, total / 11) < 1e-6
    assert rel(model(ids, labels=labels, num_items_in_batch=torch.tensor(11)).loss, total / 11) < 1e-6


def test_what_collators_add_is_accepted(lively_model, ids, rel):
    model = lively_model().train()
    extras = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(37).expand(2, -1),
        "num_items_in_batch": torch.tensor(72),
        "output_attentions": False,
    }
    assert rel(model(ids, labels=ids, **extras).loss, model(ids, labels=ids).loss) < 1e-6


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_the_flattening_collator_of_transformers(lively_model, ids, rel, options, training):
    model = lively_model().train(training)
    documents = [ids[0, :5], ids[0, 5:18], ids[1]]
    batch = DataCollatorWithFlattening(**options)([{"input_ids": document.tolist()} for document in documents])
    logits = model(**batch).logits[0].split([5, 13, 37])
    for piece, document in zip(logits, documents, strict=True):
        assert rel(piece, model(document[None]).logits[0]) < 1e-5


def test_gradients_of_a_padded_batch_equal_those_of_its_rows(lively_model, ids, rel):
    model = lively_model().double().train()
    batch, mask = ids.clone(), torch.ones_like(ids)
    batch[0, :30], mask[0, :30] = 0, 0
    labels = torch.where(mask == 1, batch, -100)
    actual = gradients(model, input_ids=batch, attention_mask=mask, labels=labels, num_items_in_batch=1)
    short = gradients(model, input_ids=ids[:1, 30:], labels=ids[:1, 30:], num_items_in_batch=1)
    whole = gradients(model, input_ids=ids[1:], labels=ids[1:], num_items_in_batch=1)
    # The first real token of the short row is predicted from a pad; that term belongs to the batch alone.
    lead = labels.clone()
    lead[0, 31:], lead[1] = -100, -100
    pad = gradients(model, input_ids=batch, attention_mask=mask, labels=lead, num_items_in_batch=1)
    for name, gradient in actual.items():
        assert rel(gradient, short[name] + whole[name] + pad[name]) < 1e-9, name


@pytest.mark.parametrize(
    ("keep", "kept"), [(1, [36]), (5, [32, 33, 34, 35, 36]), (torch.tensor([0, 7]), [0, 7]), (0, list(range(37)))]
)
def test_logits_to_keep(lively_model, ids, rel, keep, kept):
    model = lively_model()
    logits = model(ids, logits_to_keep=keep).logits
    assert logits.shape == (2, len(kept), 53)
    assert rel(logits, model(ids).logits[:, kept]) < 1e-6


def test_hidden_states(lively_model, ids):
    model = lively_model()
    output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == 4
    assert torch.equal(output.hidden_states[0], model.get_input_embeddings()(ids))
    assert torch.equal(output.hidden_states[-1], model.backbone(ids).last_hidden_state)
    assert model(ids).hidden_states is None


def test_inputs_as_embeddings(lively_model, ids):
    model = lively_model()
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)


@pytest.mark.parametrize("inputs", [{}, {"input_ids": torch.ones(1, 3).long(), "inputs_embeds": torch.ones(1, 3, 24)}])
def test_both_or_neither_kind_of_input_is_refused(lively_model, inputs):
    with pytest.raises(UsageError, match="both or neither of input_ids and inputs_embeds"):
        lively_model()(**inputs)


@pytest.mark.parametrize("in_fp32", [True, False])
def test_the_residual_stream_is_in_fp32_when_the_config_says_so(lively_model, ids, in_fp32):
    model = lively_model(residual_in_fp32=in_fp32).to(torch.bfloat16)
    output = model(ids, output_hidden_states=True)
    assert output.hidden_states[1].dtype == (torch.float32 if in_fp32 else torch.bfloat16)
    assert output.hidden_states[-1].dtype == torch.bfloat16
    assert output.logits.dtype == torch.float32


def test_lora_on_the_projections_of_both_kinds_of_layer(lively_model, ids, rel):
    peft = pytest.importorskip("peft")
    model = lively_model()
    expected = model(ids).logits
    config = peft.LoraConfig(r=2, target_modules=["in_proj", "out_proj"], modules_to_save=["metaplasticity"])
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    assert rel(model(ids).logits, expected) < 1e-6, "a fresh adapter changes nothing"
    found = gradients(model.train(), input_ids=ids, labels=ids)
    for layer in range(3):
        assert any(f"layers.{layer}.mixer.in_proj.lora_B" in name for name in found)
    assert sum("metaplasticity.modules_to_save" in name for name in found) == 2 * 4
    with torch.no_grad(), metaplasticity_off(model), metaplasticity_off(lively_model()) as source:
        assert rel(model(ids).logits, source(ids).logits) < 1e-6


@pytest.mark.parametrize("collator", [None, DataCollatorWithFlattening()], ids=["padded", "flattened"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_trainer_of_transformers(lively_model, ids, tmp_path, collator):
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    model = lively_model()
    before = model.backbone.layers[0].mixer.metaplasticity.beta_scale.detach().clone()
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)
    trainer.train()
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    assert not torch.equal(model.backbone.layers[0].mixer.metaplasticity.beta_scale, before)
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.slow
def test_torch_compile_gives_the_same_numbers_at_two_lengths(lively_model, ids, rel):
    model = lively_model(num_hidden_layers=2, palimpsa_layers=[1])
    # Tracing is what may go wrong; a code generator behind it would only add minutes.
    compiled = torch.compile(model, dynamic=True, backend="eager")
    with torch.no_grad():
        for length, pads in ((19, 4), (37, 0)):
            mask = torch.ones_like(ids[:, :length])
            mask[0, :pads] = 0
            inputs = {"input_ids": ids[:, :length], "attention_mask": mask, "use_cache": False}
            real = mask == 1
            assert rel(compiled(**inputs).logits[real], model(**inputs).logits[real]) < 1e-5


def test_label_smoothing_in_the_trainer_is_of_the_next_token(lively_model, ids, tmp_path):
    model = lively_model().train()
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    trainer = Trainer(model=model, args=arguments)
    found = trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    logits = model(ids).logits[:, :-1].log_softmax(-1)
    nll = -logits.gather(2, ids[:, 1:, None]).mean()
    assert found.item() == pytest.approx((0.9 * nll - 0.1 * logits.mean()).item(), rel=1e-5)  # fp32
