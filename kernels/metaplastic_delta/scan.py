"""The operator's front door: `metaplastic_delta_scan` and `metaplastic_delta_step` validate, choose a backend, run it.

This project's own operator, untested as to benefit (`docs/delta.md`). A backend is one file beside this one and one
line in `METAPLASTIC_DELTA`. Its module offers

    scan(inputs: DeltaInputs) -> DeltaOutput
    step(inputs: DeltaInputs) -> output
    unavailable(device) -> str | None       optional: why it cannot run on this device
    unsupported(problem) -> str | None      optional: why it cannot run this `DeltaProblem`
"""

from torch import Tensor

from ...base.errors import UsageError
from ..backends import Backend, Operator, eager
from ..common.arguments import check_decay_and_prior, check_kind, dims
from ..common.documents import check_cu_seqlens
from .types import DeltaInputs, DeltaOutput, DeltaState

METAPLASTIC_DELTA = Operator(
    "the metaplastic delta rule",
    Backend("torch", "metaplastic_delta.torch_chunk", kernel=False),
    Backend("reference", "metaplastic_delta.reference", kernel=False),
)


@eager
def metaplastic_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    *,
    initial_state: DeltaState | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> DeltaOutput:
    """The gated delta rule with an importance per key, over a whole sequence.

    Per head, with a_t = exp(log_decay_t), products per key and no sums but those written:
        I'_t = prior + a_t J_{t-1}      w_t = a_t (prior + J_{t-1}) / I'_t      K_t = b_t k_t / I'_t
        S_t = S_{t-1} diag(w_t) (1 - k_t K_t^T) + v_t K_t^T      J_t = a_t J_{t-1} + beta_t k_t^2      o_t = S_t q_t
    With beta = 0 and prior = 1 it is the gated delta rule. It is stable while I' >= b |k|^2 / 2: for unit keys and b up
    to 2, keep the prior at 1 or above.
    All inputs and the initial state are differentiable, through the output and the final state.

    Args:
        q: [B, T, G, N] queries; head i uses group i // (H / G).
        k: [B, T, G, N] keys, of norm 1 where the rule is to be a delta rule.
        v: [B, T, H, P] values.
        b: [B, T, H] write gate, from 0 to 2.
        beta: [B, T, H] >= 0, what a token adds to the importance of its keys.
        log_decay: [B, T, H], or [B, T, H, N] for a decay per key; <= 0, nats per token.
        prior: [H] > 0.
        initial_state: (S [B, H, P, N], J [B, H, N]); zeros when None. With `cu_seqlens` one state per document.
        cu_seqlens: [documents + 1] integers, where each packed document starts, then T; needs B = 1.
        backend: "auto" or a name of `METAPLASTIC_DELTA`.

    Returns:
        output [B, T, H, P] in v's dtype; state in fp32 (fp64 for fp64 inputs), one row a sequence or document.

    Raises:
        UsageError: an argument has a wrong shape, dtype, device or value.
        KernelUnavailableError: the backend cannot run here; always where kernels are required, for there is none.
    """
    state = None if initial_state is None else DeltaState(*initial_state)
    inputs = DeltaInputs(q, k, v, b, beta, log_decay, prior, state, cu_seqlens)
    _check(inputs, "initial_state")
    return METAPLASTIC_DELTA.choose(backend, v.device, inputs.problem).scan(inputs)


@eager
def metaplastic_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    state: DeltaState | tuple[Tensor, Tensor],
    *,
    backend: str = "auto",
) -> Tensor:
    """One token: `state` is updated in place. Not differentiable: a scan of one token is.

    Args:
        q: [B, G, N].
        k: [B, G, N].
        v: [B, H, P].
        b: [B, H].
        beta: [B, H].
        log_decay: [B, H] or [B, H, N].
        prior: [H].
        state: (S [B, H, P, N], J [B, H, N]) in fp32; strided views are fine.
        backend: as in `metaplastic_delta_scan`.

    Returns:
        output [B, H, P] in v's dtype.

    Raises:
        UsageError: an argument has a wrong shape, dtype, device or value.
        KernelUnavailableError: the backend cannot run here.
    """
    inputs = DeltaInputs(q, k, v, b, beta, log_decay, prior, DeltaState(*state))
    for name, ranks in (("q", (3,)), ("k", (3,)), ("v", (3,)), ("b", (2,)), ("beta", (2,)), ("log_decay", (2, 3))):
        x = getattr(inputs, name)
        if x.dim() not in ranks:
            expected = " or ".join(map(str, ranks))
            raise UsageError(f"{name} of one step has shape {dims(x)}; expected {expected} dimensions, no time.")
    _check(DeltaInputs(*(x.unsqueeze(1) for x in inputs[:6]), *inputs[6:]), "state")
    return METAPLASTIC_DELTA.choose(backend, v.device, inputs.problem).step(inputs)


def _check(inputs: DeltaInputs, state: str) -> None:
    """Refuses inputs of a scan that do not fit each other; `state` is what the caller calls the initial state."""
    ranks = {"q": 4, "k": 4, "v": 4, "b": 3, "beta": 3, "log_decay": 3, "prior": 1}
    for name, rank in ranks.items():
        x = getattr(inputs, name)
        if x.dim() != rank and not (name == "log_decay" and x.dim() == 4):
            more = " (4 for a decay per key)" if name == "log_decay" else ""
            raise UsageError(f"{name} has shape {dims(x)}; expected {rank} dimension{'s' * (rank > 1)}{more}.")
        check_kind(name, x, inputs.v)
    k, v, cu_seqlens = inputs.k, inputs.v, inputs.cu_seqlens
    batch, length, heads, head_dim = v.shape
    groups, state_size = k.shape[2:]
    if 0 in (length, groups, state_size, heads, head_dim, batch):
        raise UsageError(f"v has shape {dims(v)} and k {dims(k)}; expected no empty dimension, at least one token.")
    if heads % groups:
        raise UsageError(f"v has {heads} heads and k {groups} groups; expected groups that divide the heads.")
    per_head, per_key = (batch, length, heads), (batch, length, heads, state_size)
    expected = {
        **dict.fromkeys(("k", "q"), (batch, length, groups, state_size)),
        **dict.fromkeys(("b", "beta"), per_head),
        "log_decay": per_key if inputs.log_decay.dim() == 4 else per_head,
        "prior": (heads,),
    }
    for name, wanted in expected.items():
        x = getattr(inputs, name)
        if x.shape != wanted:
            raise UsageError(f"{name} has shape {dims(x)}; expected {list(wanted)} beside v {dims(v)}.")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, length)
    check_decay_and_prior(inputs.log_decay, inputs.prior)
    if inputs.initial_state is not None:
        rows = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        wanted = ((rows, heads, head_dim, state_size), (rows, heads, state_size))
        for part, x, shape in zip("SJ", inputs.initial_state, wanted, strict=True):
            if x.shape != shape:
                raise UsageError(f"{state}.{part} has shape {dims(x)}; expected {list(shape)}.")
            check_kind(f"{state}.{part}", x, v)
