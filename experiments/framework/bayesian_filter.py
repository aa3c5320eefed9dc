"""One Bayesian filter over the memory of one head; the models of `docs/framework.md` differ in what it keeps.

The memory is N(mu, P^-1): a mean mu [values, keys] and a precision P [keys, keys] that all values share. A token
first forgets, then observes v = mu k with precision beta:

    P'  = a P + (1 - a) P0          P' mu' = a P mu
    P   = P' + beta k k^T           P mu   = P' mu' + beta v k^T          o = mu q
"""

from __future__ import annotations

import torch
from torch import Tensor

FULL, BEFORE, AFTER, RESET = "full", "diagonal before the mean", "diagonal after the mean", "reset to the prior"
KEPT = (FULL, BEFORE, AFTER, RESET)
"""What is kept of the precision: all of it; its diagonal, taken before or after the mean is solved for; nothing."""


def bayesian_filter(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, beta: Tensor, kept: str, prior: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Runs the filter by solving a system of equations at every token.

    Args:
        q: [T, N].
        k: [T, N].
        v: [T, P].
        a: [T], what survives of the precision.
        beta: [T] >= 0, the precision of each observation.
        kept: one of `KEPT`.
        prior: P0 is this times the identity.

    Returns:
        o [T, P], and the diagonal of the precision after each token, [T, N].
    """
    eye = torch.eye(k.shape[1], dtype=k.dtype)
    precision, mean = prior * eye, k.new_zeros(v.shape[1], k.shape[1])
    outputs, diagonals = [], []
    for t in range(len(k)):
        forgotten = a[t] * precision + (1 - a[t]) * prior * eye
        natural = a[t] * mean @ precision + beta[t] * torch.outer(v[t], k[t])
        precision = forgotten + beta[t] * torch.outer(k[t], k[t])
        if kept == BEFORE:
            precision = precision.diag().diag()
        mean = torch.linalg.solve(precision, natural, left=False)
        if kept == AFTER:
            precision = precision.diag().diag()
        diagonals.append(precision.diag())
        if kept == RESET:
            precision = prior * eye
        outputs.append(mean @ q[t])
    return torch.stack(outputs), torch.stack(diagonals)
