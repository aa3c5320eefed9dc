"""The operator's front door: `metaplastic_scan` and `metaplastic_step` validate, choose a backend and run it.

A backend is one file beside this one and one line in `METAPLASTIC_SCAN`. Its module offers

    scan(inputs: ScanInputs) -> ScanOutput
    step(inputs: ScanInputs) -> (output, variance or None)
    unavailable(device) -> str | None       optional: why it cannot run on this device
    unsupported(problem) -> str | None      optional: why it cannot run this `ScanProblem`
"""

from torch import Tensor

from ...base.errors import UsageError
from ..backends import TRITON_DEVICES, Backend, Operator, eager
from ..common.arguments import check_decay_and_prior, check_kind, dims
from ..common.documents import check_cu_seqlens
from .types import ScanInputs, ScanOutput, ScanState

METAPLASTIC_SCAN = Operator(
    "the metaplastic scan",
    Backend("gluon", "metaplastic.gluon_scan", ("cuda",)),
    Backend("numba", "metaplastic.numba_scan", ("cpu",)),
    Backend("triton", "metaplastic.triton_scan", TRITON_DEVICES),
    Backend("torch", "metaplastic.torch_chunk", kernel=False),
    Backend("reference", "metaplastic.reference", kernel=False),
)


@eager
def metaplastic_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    *,
    initial_state: ScanState | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    variance: bool = False,
) -> ScanOutput:
    """Palimpsa-M over a whole sequence.

    Per head, with a_t = exp(log_decay_t), I_t = prior + J_t and M the product of importance and memory:
        M_t = a_t M_{t-1} + v_t (x) k_t      J_t = a_t J_{t-1} + beta_t (x) k_t^2      o_t = sum_k q_t M_t / I_t
    All inputs and the initial state are differentiable, through the output, the final state and the variance.

    Args:
        q: [B, T, G, N] queries; head i uses group i // (H / G).
        k: [B, T, G, N] keys.
        v: [B, T, H, P] values, already times the step size.
        beta: [B, T, H, g] >= 0, already times the step size; g divides P and channel c uses beta[..., c // (P / g)].
        log_decay: [B, T, H] <= 0, nats per token.
        prior: [H] > 0.
        initial_state: (M [B, H, P, N], J [B, H, g, N]); zeros when None. With `cu_seqlens` one state per document.
        cu_seqlens: [S + 1] integers, where each packed document starts, then T; needs B = 1.
        chunk_size: tokens between stored states; a backend's own choice when None.
        backend: "auto" or a name of `METAPLASTIC_SCAN`.
        variance: also return sum_k q_t^2 / I_t.

    Returns:
        output [B, T, H, P] in v's dtype; state in fp32 (fp64 for fp64 inputs), leading size B, or S when packed;
        variance [B, T, H, g] in the state's dtype, or None.

    Raises:
        UsageError: an argument has a wrong shape, dtype, device or value.
        KernelUnavailableError: the backend cannot run here.
    """
    state = None if initial_state is None else ScanState(*initial_state)
    inputs = ScanInputs(q, k, v, beta, log_decay, prior, state, cu_seqlens, chunk_size, variance)
    _check(inputs, "initial_state")
    return METAPLASTIC_SCAN.choose(backend, v.device, inputs.problem).scan(inputs)


@eager
def metaplastic_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    state: ScanState | tuple[Tensor, Tensor],
    *,
    backend: str = "auto",
    variance: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One token: `state` is updated in place. Not differentiable: a scan of one token is.

    Args:
        q: [B, G, N].
        k: [B, G, N].
        v: [B, H, P].
        beta: [B, H, g].
        log_decay: [B, H].
        prior: [H].
        state: (M [B, H, P, N], J [B, H, g, N]) in fp32; strided views are fine when the last dimension is contiguous.
        backend: as in `metaplastic_scan`.
        variance: also return sum_k q^2 / I.

    Returns:
        output [B, H, P] in v's dtype; with `variance` a pair (output, variance [B, H, g]).

    Raises:
        UsageError: an argument has a wrong shape, dtype, device or value.
        KernelUnavailableError: the backend cannot run here.
    """
    inputs = ScanInputs(q, k, v, beta, log_decay, prior, ScanState(*state), variance=variance)
    for name, rank in (("q", 3), ("k", 3), ("v", 3), ("beta", 3), ("log_decay", 2)):
        x = getattr(inputs, name)
        if x.dim() != rank:
            raise UsageError(f"{name} of one step has shape {dims(x)}; expected {rank} dimensions, no time.")
    _check(ScanInputs(*(x.unsqueeze(1) for x in inputs[:5]), *inputs[5:]), "state")
    if any(x.stride(-1) != 1 for x in inputs.initial_state):
        raise UsageError("state has a last dimension that is not contiguous; expected M and J with stride 1 over N.")
    output, var = METAPLASTIC_SCAN.choose(backend, v.device, inputs.problem).step(inputs)
    return (output, var) if variance else output


def _check(inputs: ScanInputs, state: str) -> None:
    """Refuses inputs of a scan that do not fit each other; `state` is what the caller calls the initial state."""
    for name, rank in (("q", 4), ("k", 4), ("v", 4), ("beta", 4), ("log_decay", 3), ("prior", 1)):
        x = getattr(inputs, name)
        if x.dim() != rank:
            raise UsageError(f"{name} has shape {dims(x)}; expected {rank} dimension{'s' * (rank > 1)}.")
        check_kind(name, x, inputs.v)
    k, v, beta, cu_seqlens = inputs.k, inputs.v, inputs.beta, inputs.cu_seqlens
    batch, length, heads, head_dim = v.shape
    groups, state_size = k.shape[2:]
    if 0 in (length, groups, state_size, heads, head_dim, batch):
        raise UsageError(f"v has shape {dims(v)} and k {dims(k)}; expected no empty dimension, at least one token.")
    if heads % groups:
        raise UsageError(f"v has {heads} heads and k {groups} groups; expected groups that divide the heads.")
    expected = {
        "k": (batch, length, groups, state_size),
        "q": (batch, length, groups, state_size),
        "beta": (batch, length, heads, beta.shape[3]),
        "log_decay": (batch, length, heads),
        "prior": (heads,),
    }
    for name, wanted in expected.items():
        x = getattr(inputs, name)
        if x.shape != wanted:
            raise UsageError(f"{name} has shape {dims(x)}; expected {list(wanted)} beside v {dims(v)}.")
    if not beta.shape[3] or head_dim % beta.shape[3]:
        raise UsageError(f"beta has {beta.shape[3]} groups; expected a divisor of the {head_dim} channels of a head.")
    if inputs.chunk_size is not None and inputs.chunk_size < 1:
        raise UsageError(f"chunk_size is {inputs.chunk_size}; expected a positive number of tokens.")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, length)
    check_decay_and_prior(inputs.log_decay, inputs.prior)
    if inputs.initial_state is not None:
        rows = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        wanted = ((rows, heads, head_dim, state_size), (rows, heads, beta.shape[3], state_size))
        for part, x, shape in zip("MJ", inputs.initial_state, wanted, strict=True):
            if x.shape != shape:
                raise UsageError(f"{state}.{part} has shape {dims(x)}; expected {list(shape)}.")
            check_kind(f"{state}.{part}", x, v)
