import pytest
import torch
from palimpsa_surgery.modeling import metaplasticity_off, record_importance
from transformers import DynamicCache


@torch.no_grad()
@pytest.mark.parametrize("beta_groups", [1, 2, 8])
def test_figures_are_those_of_the_final_state(lively_model, ids, beta_groups):
    model = lively_model(beta_groups=beta_groups)
    cache = DynamicCache(config=model.config)
    with record_importance(model) as recorder:
        model(ids, cache=cache)
    layers = recorder.layers()
    assert list(layers) == [0, 2]
    for index, figures in layers.items():
        mixer = model.backbone.layers[index].mixer
        J = mixer.split_state(cache.layers[index].recurrent_states[0]).J
        importance = (mixer.metaplasticity.prior().view(1, -1, 1, 1) + J).flatten(2)
        low, high = (torch.quantile(importance, q, dim=-1, interpolation="nearest") for q in (0.05, 0.95))
        by_head = importance.mean((0, 2))
        assert figures.layer == index
        assert figures.sequences == 2
        assert figures.mean == pytest.approx(importance.mean().item(), rel=1e-5)
        assert figures.low == pytest.approx(low.mean().item(), rel=1e-5)
        assert figures.high == pytest.approx(high.mean().item(), rel=1e-5)
        assert figures.ratio == pytest.approx((high / low).mean().item(), rel=1e-5)
        assert figures.head_spread == pytest.approx((by_head.max() / by_head.min()).item(), rel=1e-5)
        assert figures.ratio > 1


@torch.no_grad()
def test_batches_padding_and_packing_give_the_same_averages(lively_model, ids):
    model = lively_model()
    documents = [ids[0, :5], ids[0, 5:18], ids[1]]

    def figures(*batches):
        with record_importance(model) as recorder:
            for batch in batches:
                model(**batch)
        return {index: (f.mean, f.low, f.high, f.ratio, f.sequences) for index, f in recorder.layers().items()}

    expected = figures(*({"input_ids": document[None]} for document in documents))
    packed = {"input_ids": torch.cat(documents)[None], "cu_seq_lens_q": torch.tensor([0, 5, 18, 55])}
    padded = {"input_ids": torch.zeros(3, 37).long(), "attention_mask": torch.zeros(3, 37).long()}
    for row, document in enumerate(documents):
        padded["input_ids"][row, -len(document) :] = document
        padded["attention_mask"][row, -len(document) :] = 1
    for batch in (packed, padded):
        for index, values in figures(batch).items():
            assert values == pytest.approx(expected[index], rel=1e-4)


@torch.no_grad()
def test_nothing_is_consolidated_without_metaplasticity(lively_model, ids):
    model = lively_model()
    with record_importance(model) as recorder, metaplasticity_off(model):
        model(ids)
    assert {(f.mean, f.ratio, f.head_spread) for f in recorder.layers().values()} == {(1.0, 1.0, 1.0)}


def test_recording_changes_nothing_and_ends_even_after_an_error(lively_model, ids):
    model = lively_model()
    expected = model(ids).logits
    with record_importance(model):
        assert torch.equal(model(ids).logits, expected)
    with pytest.raises(RuntimeError, match="inside"), record_importance(model) as recorder:
        raise RuntimeError("inside")
    model(ids)
    assert recorder.layers() == {}
    assert all(getattr(m, "importance_observer", None) is None for m in model.modules())


def test_a_plain_model_has_no_figures(lively_model, ids):
    model = lively_model(palimpsa_layers=[])
    with record_importance(model) as recorder:
        model(ids)
    assert recorder.layers() == {}


def test_recording_in_training_keeps_no_graph(lively_model, ids):
    model = lively_model().train()
    with record_importance(model) as recorder:
        model(ids, labels=ids).loss.backward()
    assert all(not torch.as_tensor(value).requires_grad for sums in recorder._sums.values() for value in sums)
    assert set(recorder.layers()) == {0, 2}
