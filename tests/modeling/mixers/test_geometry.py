import dataclasses

import pytest
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.modeling import MixerGeometry

VALID = {
    "hidden_size": 24,
    "num_heads": 6,
    "head_dim": 8,
    "n_groups": 2,
    "state_size": 10,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "norm_eps": 1e-5,
    "time_step_limit": (0.0, float("inf")),
    "chunk_size": 16,
    "beta_rank": 5,
    "beta_groups": 4,
    "beta_scale_form": "abs",
    "train_prior": True,
}


def test_sizes_follow_the_layout_of_the_projection():
    geometry = MixerGeometry(**VALID)
    assert geometry.inner_size == 48
    assert geometry.conv_channels == 48 + 2 * 2 * 10
    assert geometry.projection_sizes == (48, 88, 6)
    assert geometry.projection_size == 142


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MixerGeometry(**VALID).num_heads = 3


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        ({"beta_rank": 0}, "beta_rank is 0; it must be at least 1"),
        ({"conv_kernel": 1}, "conv_kernel is 1; it must be at least 2"),
        ({"n_groups": 4}, r"n_groups \(4\) must divide num_heads \(6\)"),
        ({"beta_groups": 3}, r"beta_groups is 3; it must divide head_dim \(8\)"),
        ({"beta_groups": 0}, "beta_groups is 0"),
        ({"beta_scale_form": "linear"}, "beta_scale_form is 'linear'; it must be one of abs, softplus"),
        ({"time_step_limit": (0.2, 0.1)}, r"time_step_limit is \[0.2, 0.1\]"),
        ({"time_step_limit": (-1.0, 0.1)}, "two numbers from 0 on, the lower first"),
    ],
)
def test_refuses_what_cannot_be_built(over, message):
    with pytest.raises(UsageError, match=message):
        MixerGeometry(**{**VALID, **over})
