"""How swapped layers can start: what the stages know of each initialization. Its numbers are made in `conversion/`.

A new one is one line here, one function in `conversion/initialization.py`, and its name in the help of `--init`.
"""

from __future__ import annotations

from typing import NamedTuple


class Init(NamedTuple):
    """One initialization.

    Attributes:
        meaning: what it keeps of the source, for readers of plans and cards; `{strength}` is that of the plan.
        scale_form: its default of `beta_scale_form`.
        exact: whether the model equals its source with importance at work, which conversion then verifies, too.
        calibrated: whether it takes a strength and the calibration statistics of a profile measured on text.
    """

    meaning: str
    scale_form: str
    exact: bool = False
    calibrated: bool = False


INITS = {
    "identity": Init("the logits of the source, to rounding", "abs", exact=True),
    "calibrated": Init(
        "each head's output at the source's scale, at a mean importance growth of {strength}", "abs", calibrated=True
    ),
    "paper": Init("the random start of the paper", "softplus"),
}
"""By the name in plans."""
DEFAULT_INIT = "identity"


def is_calibrated(init: str | None) -> bool:
    """Whether an initialization needs calibration statistics; False for a name that is none."""
    return init in INITS and INITS[init].calibrated
