"""Recipes on hybrids: losses with each host's factor, what trains, what decays, what adapters are put on."""

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.mixers.geometry import GateSpec
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import known_hosts
from palimpsa_surgery.modeling.hybrids.hosts import HOSTS, mixer_path, mixer_paths, norm_path
from palimpsa_surgery.recipes.data.packing import IGNORED
from palimpsa_surgery.recipes.training.losses import CausalLoss, document_positions
from palimpsa_surgery.recipes.training.modes import add_adapters, check_packing, check_shared, coverage
from palimpsa_surgery.recipes.training.optim import decays, select_parameters
from palimpsa_surgery.recipes.training.recipe import load_recipe
from tiny_hybrids import DELTAS, PROJECTIONS, SWAPPED, VARIANTS, make_hybrid, token_ids

FP32 = 1e-5  # relative

DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9 + [2] * 5, [0] * 21, [3] * 20 + [4]])


@pytest.fixture(scope="module", params=known_hosts())
def kind(request):
    return request.param


def recipe_of(**changes):
    return load_recipe({"steps": 1, **changes})


def targets_of(ids):
    return torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED)


@torch.no_grad()
def test_the_loss_in_chunks_is_the_models_own(kind):
    model, ids = make_hybrid(kind), token_ids()
    expected = model(ids, labels=ids).loss
    loss = CausalLoss(model)(ids, targets_of(ids)) / (ids.numel() - len(ids))
    torch.testing.assert_close(loss, expected, rtol=FP32, atol=0.0)


@torch.no_grad()
def test_packed_documents_have_the_losses_of_documents_alone(kind):
    """In attention and in mixers, swapped or not."""
    if not HOSTS[kind].keeps_documents_apart or kind in DELTAS:
        pytest.skip("refused, see below")
    loss, ids = CausalLoss(make_hybrid(kind)), token_ids()
    packed = loss(ids, targets_of(ids), DOCUMENTS, per_token=True)
    for row, document in ((0, slice(0, 7)), (0, slice(7, 16)), (0, slice(16, 21)), (2, slice(0, 20))):
        alone = loss(ids[row, document][None], targets_of(ids)[row, document][None], per_token=True)
        torch.testing.assert_close(packed[row, document], alone[0], rtol=1e-4, atol=1e-4)


def test_positions_start_again_with_each_document():
    expected = [[*range(7), *range(9), *range(5)], [*range(21)], [*range(20), 0]]
    assert document_positions(DOCUMENTS).tolist() == expected


def test_documents_are_kept_apart_where_the_hosts_own_layers_keep_them(kind):
    check_packing(make_hybrid(kind), recipe_of(data={"packing": "stream"}))
    if kind in DELTAS:
        with pytest.raises(UsageError, match=rf"documents of {kind} apart with kernels that are not tested here"):
            check_packing(make_hybrid(kind), recipe_of())
        return
    if HOSTS[kind].keeps_documents_apart:
        check_packing(make_hybrid(kind), recipe_of())
        return
    with pytest.raises(UsageError, match=rf"the attention of {kind} in transformers reads across the documents"):
        check_packing(make_hybrid(kind), recipe_of())
    check_packing(make_hybrid(kind, layers=[0, 1], layer_types=["mamba"] * 3), recipe_of())


def test_new_and_swapped_are_the_mixers_and_the_norms_before_them(kind):
    model = make_hybrid(kind)
    select_parameters(model, "new+swapped", SWAPPED[kind])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    places = tuple(f"{path(model.config, i)}." for i in SWAPPED[kind] for path in (mixer_path, norm_path))
    assert trained == {name for name, _ in model.named_parameters() if name.startswith(places)}
    for i in SWAPPED[kind]:
        assert f"{norm_path(model.config, i)}.weight" in trained


def test_matrices_decay_and_nothing_else(kind):
    kept = ("conv1d.weight", "embeddings.weight", "embed_tokens.weight", "lm_head.weight")
    for variant in VARIANTS:
        if variant.startswith(kind):
            for name, parameter in make_hybrid(variant).named_parameters():
                assert decays(name) == (parameter.ndim > 1 and not name.endswith(kept)), name


def adapted(model):
    return {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}


def test_adapters_are_put_on_modules_by_full_name_in_every_mixer(kind):
    pytest.importorskip("peft")
    model = make_hybrid(kind)
    paths = mixer_paths(model.config)
    plain = len(paths) - len(SWAPPED[kind])
    first, last = PROJECTIONS[kind]
    expected = {f"{path}.{name}" for path in paths.values() for name in (first, last)}
    rows = coverage(model, [first, last], SWAPPED[kind])
    assert [(row.swapped, row.source) for row in rows] == [(len(SWAPPED[kind]), plain)] * 2
    peft = add_adapters(model, recipe_of(mode="lora", lora={"targets": [first, last]}), SWAPPED[kind])
    assert {name.removeprefix("base_model.model.") for name in adapted(peft)} == expected
    whole = [name for name, p in peft.named_parameters() if p.requires_grad and "lora_" not in name]
    assert len(whole) == len(SWAPPED[kind]) * len(GateSpec.TENSORS)


@pytest.mark.parametrize("kind", [kind for kind in DELTAS if kind in known_hosts()])
def test_targets_of_a_mamba2_are_refused_with_the_names_of_the_hosts_own(kind):
    pytest.importorskip("peft")
    with pytest.raises(UsageError, match=f"in_proj matches no module; .*{PROJECTIONS[kind][0]} and .*every mixer"):
        add_adapters(make_hybrid(kind), recipe_of(mode="lora"), SWAPPED[kind])


def test_targets_in_blocks_that_layers_share_are_refused():
    model = make_hybrid("zamba2")
    check_shared(model, ["in_proj", "out_proj"])
    with pytest.raises(UsageError, match=r"lora.targets: o_proj is shared between layers"):
        check_shared(model, ["o_proj"])
