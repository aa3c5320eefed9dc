"""Narrow bounds of the step size and biases of the projections, where hosts decode unbounded and let pads in.

What published configs do not have, but may: of each host, its mixers swapped or not.
"""

import pytest
import torch
from absent import ABSENT, run
from palimpsa_surgery.mixers.metaplasticity import metaplasticity_off
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import known_hosts
from palimpsa_surgery.modeling.hybrids.hosts import mixer_paths
from tiny_hybrids import DELTAS, SWAPPED, make_host, make_hybrid, token_ids, with_true_bounds

FP32 = 1e-5  # relative L2
BOUNDS = (0.01, 0.05)
BIAS = {
    **dict.fromkeys(("bamba", "granitemoehybrid", "falcon_h1"), "mamba_proj_bias"),
    "zamba2": "add_bias_linear",
    "nemotron_h": "use_bias",
}
STEPS = 4

MASK = torch.ones(3, 21, dtype=torch.long)
MASK[1, :6], MASK[2, :15] = 0, 0
PADDED = token_ids() * MASK


def distance(one, two):
    return ((one - two).norm() / two.norm()).item()


def bounds(kind):
    """Of zamba2 it is the class that bounds, from below, and its models were trained without."""
    return {"time_step_min": BOUNDS[0]} if kind == "zamba2" else {"time_step_limit": BOUNDS}


def layers_of(kind, which):
    return {"plain": [], "swapped": SWAPPED[kind]}[which]


@pytest.fixture(params=["plain", "swapped"])
def model(request, mamba_kind):
    """A hybrid with bounds and biases, its mixers all plain or some swapped."""
    return make_hybrid(
        mamba_kind, layers=layers_of(mamba_kind, request.param), **bounds(mamba_kind), **{BIAS[mamba_kind]: True}
    )


def decoded(model, ids, mask):
    """Logits [B, STEPS, V] of decoding token by token, and those of the same tokens in one pass."""
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, **options)
    with torch.no_grad():
        whole = model(out.sequences, attention_mask=torch.cat([mask, mask.new_ones(len(mask), STEPS)], 1)).logits
    return torch.stack(out.logits, 1), whole[:, ids.shape[1] - 1 : -1]


def test_every_mixer_has_the_bounds_and_the_biases(model, mamba_kind):
    for path in mixer_paths(model.config).values():
        mixer = model.get_submodule(path)
        assert mixer.geometry.time_step_limit == ((0.0, float("inf")) if mamba_kind == "zamba2" else BOUNDS)
        assert mixer.in_proj.bias.abs().max() > 0.1


@torch.no_grad()
def test_the_bounds_matter(model, mamba_kind):
    if mamba_kind == "zamba2":
        pytest.skip("trained without")
    unbounded = make_hybrid(mamba_kind, layers=model.config.palimpsa_layers, **{BIAS[mamba_kind]: True})
    assert distance(model(token_ids()).logits, unbounded(token_ids()).logits) > 0.01


def test_decoding_token_by_token_is_one_pass(model):
    """Hosts do not bound the step size of a decoded token."""
    assert distance(*decoded(model, PADDED, MASK)) < FP32


@torch.no_grad()
def test_a_padded_row_is_the_row_alone(model):
    """In hosts the convolution sees the bias in the place of a pad."""
    logits = model(PADDED, attention_mask=MASK).logits
    for row, (ids, mask) in enumerate(zip(PADDED, MASK.bool(), strict=True)):
        assert distance(logits[row, mask], model(ids[mask][None]).logits[0]) < FP32


@torch.no_grad()
def test_whole_rows_are_as_in_the_host(model, mamba_kind):
    host = with_true_bounds(make_host(mamba_kind, **bounds(mamba_kind), **{BIAS[mamba_kind]: True}))
    with metaplasticity_off(model):
        assert distance(model(token_ids()).logits, host(token_ids()).logits) < FP32


CODE = """
    import torch
    from transformers import AutoModelForCausalLM
    home, *names = sys.argv[1:]
    ids, mask = torch.load(home + "/ids.pt")
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(f"{home}/{name}", trust_remote_code=True)
        options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
        out = model.generate(ids, attention_mask=mask, max_new_tokens=4, **options)
        with torch.no_grad():
            torch.save((torch.stack(out.logits, 1), model(ids, attention_mask=mask).logits), f"{home}/{name}.pt")
"""


@pytest.mark.slow
def test_remote_code_bounds_and_pads_alike(tmp_path, save_with_code):
    torch.save((PADDED, MASK), tmp_path / "ids.pt")
    made = {}
    for kind in (kind for kind in known_hosts() if kind not in DELTAS):
        for which in ("plain", "swapped"):
            name = f"{kind}-{which}"
            made[name] = make_hybrid(kind, layers=layers_of(kind, which), **bounds(kind), **{BIAS[kind]: True})
            save_with_code(made[name], tmp_path / name)
    done = run(CODE, tmp_path, *made, home=tmp_path, absent=(*ABSENT, "numba"))
    assert done.returncode == 0, done.stderr[-2000:]
    for name, model in made.items():
        steps, logits = torch.load(tmp_path / f"{name}.pt")
        with torch.no_grad():
            expected = model(PADDED, attention_mask=MASK).logits
        assert distance(logits[MASK.bool()], expected[MASK.bool()]) < FP32, name
        assert distance(steps, decoded(model, PADDED, MASK)[1]) < FP32, name
