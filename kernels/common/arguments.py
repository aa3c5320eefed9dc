"""What several operators ask of their arguments."""

from torch import Tensor

from ...base.errors import UsageError


def dims(x: Tensor) -> str:
    """A shape as messages give it."""
    return str(list(x.shape))


def check_kind(name: str, x: Tensor, v: Tensor) -> None:
    """Refuse `x` that is of whole numbers, or on another device than the values `v`.

    Raises:
        UsageError: naming the argument.
    """
    if not x.is_floating_point():
        raise UsageError(f"{name} has dtype {x.dtype}; expected a floating dtype.")
    if x.device != v.device:
        raise UsageError(f"{name} is on {x.device} while v is on {v.device}; expected one device for all inputs.")


def check_decay_and_prior(log_decay: Tensor, prior: Tensor) -> None:
    """Refuse decays above 1 and priors that are not positive; values are read only on the CPU.

    Raises:
        UsageError: with the value that is out of range.
    """
    if prior.device.type != "cpu":  # reading values of a CUDA tensor would stall the stream
        return
    if not bool((prior.detach() > 0).all()):
        raise UsageError(f"prior holds {prior.min().item():g}; expected every head's prior to be positive and finite.")
    if bool((log_decay.detach() > 0).any()):
        raise UsageError(f"log_decay holds {log_decay.max().item():g}; expected values of at most 0 (decays up to 1).")
