"""Layers of a Gated DeltaNet whose rule is swapped for the metaplastic delta rule (`docs/delta.md`).

The layer stays the host's: its class, its tensors, its forward. While the forward runs, the two functions that compute
the gated delta rule are others for this layer alone: its code runs on a copy of its module's globals, so that other
layers, other models and other threads see transformers' own, and no decorator around those functions matters.
The importance J of a head's keys is one more column of the recurrent state, [B, H, N, P + 1], so that caches, beams and
offloading need to know nothing of it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import __version__
from transformers.integrations.accelerate import force_accelerate_hooks

from ...base.errors import UsageError
from ...kernels.common.precision import compute_dtype
from ...kernels.metaplastic_delta.scan import metaplastic_delta_scan, metaplastic_delta_step
from ...kernels.metaplastic_delta.types import DeltaState
from ...mixers.delta_geometry import DeltaGeometry
from ...mixers.geometry import GateSpec
from ...mixers.metaplasticity import LOG_PRIOR_LIMIT, Metaplasticity
from ...mixers.precision import KeepFp32Mixin, at_least_fp32

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
"""What the forward of every host calls, for a piece of text and for one token."""

_L2_EPS = 1e-6  # of the hosts' own rules


class DeltaMetaplasticity(Metaplasticity):
    """The importance gate of a delta rule: beta_t = sigmoid(W_up W_down h_t) f(s_head) b_t, b the layer's write gate.

    The prior is at least 1, below which a write gate of 2 is not stable.
    """

    def prior(self) -> Tensor:
        """I_prior, one number per head, [H], from 1 on and finite."""
        value = self.log_prior.to(compute_dtype(self.log_prior))
        # The gradient is that of exp alone, or a head that went below 0 would have none to come back with.
        return (value + (value.clamp(0.0, LOG_PRIOR_LIMIT) - value).detach()).exp()


class DeltaMixin(KeepFp32Mixin):
    """Before the class of a host's layer among the bases of a swapped one; see `swap_rule`.

    Attributes:
        geometry: sizes of the layer.
        metaplasticity: its importance gate.
        backend: which kernels run the rule, "auto" by default.
        importance_observer: called with (layer index, final J, prior) after each scan while statistics are recorded.
    """

    keep_fp32 = ("A_log", "dt_bias")

    geometry: DeltaGeometry
    metaplasticity: DeltaMetaplasticity
    backend: str
    importance_observer: Callable[[int, Tensor, Tensor], None] | None

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        """The host's forward, [B, T, D] to [B, T, D], with the rule swapped."""
        return run_with_rules(self, rules_of(self, hidden_states), hidden_states, *args, **kwargs)

    def split_state(self, recurrent: Tensor) -> DeltaState:
        """S [B, H, P, N] and J [B, H, N] as views of this layer's recurrent state [B, H, N, P + 1]."""
        return DeltaState(recurrent[..., :-1].transpose(-1, -2), recurrent[..., -1])

    def rule(
        self,
        hidden: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """What the host calls in place of the gated delta rule, in the terms of transformers.

        Args:
            hidden: [B, T, D], what the importance gate reads.
            query, key: [B, T, G or H, N].
            value: [B, T, H, P].
            g: [B, T, H] log decay, nats per token.
            beta: [B, T, H] write gate, from 0 to 2.
            initial_state: [B, H, N, P + 1], the last column J.
            output_final_state: whether the state is returned.
            use_qk_l2norm_in_kernel: whether queries and keys are still to be normalized.
            cu_seqlens: [documents + 1], where packed documents start.
            kwargs: not used.

        Returns:
            [B, T, H, P] in the type of `query`, and the state or None.
        """
        dtype = compute_dtype(query, value)
        q, k, v, b, decay = (x.to(dtype) for x in (query, key, value, beta, g))
        if use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
        gate, prior = self.metaplasticity(hidden, b)
        inputs = q, k, v, b, gate.squeeze(-1), decay
        with torch.autocast(query.device.type, enabled=False):
            if initial_state is not None and value.shape[1] == 1 and not torch.is_grad_enabled():
                state = initial_state.clone()  # the cache may want to go back to the one it gave
                output = metaplastic_delta_step(
                    *(x[:, 0] for x in inputs), prior, self.split_state(state), backend=self.backend
                )
                return output.unsqueeze(1).to(query.dtype), state
            output, final = metaplastic_delta_scan(
                *inputs,
                prior,
                initial_state=None if initial_state is None else self.split_state(initial_state),
                cu_seqlens=cu_seqlens,
                backend=self.backend,
            )
        if self.importance_observer is not None:
            self.importance_observer(self.layer_idx, final.J.detach(), prior.detach())
        state = torch.cat([final.S.transpose(-1, -2), final.J.unsqueeze(-1)], -1) if output_final_state else None
        return output.to(query.dtype), state


def swap_rule(layer: nn.Module, gate: GateSpec) -> nn.Module:
    """Makes a host's layer a swapped one, in place: names and tensors stay, and `metaplasticity.*` joins them.

    Raises:
        UsageError: this release of transformers computes the rule in another way.
    """
    geometry = delta_geometry(layer)
    layer.__class__ = _swapped_class(type(layer))
    layer.geometry, layer.backend, layer.importance_observer = geometry, "auto", None
    for name in layer.keep_fp32:
        setattr(layer, name, at_least_fp32(getattr(layer, name)))
    with layer.A_log.device:
        layer.metaplasticity = DeltaMetaplasticity(geometry, gate)
    return layer


def delta_geometry(layer: nn.Module) -> DeltaGeometry:
    """The sizes of a host's layer, swapped or not, which may lie on `meta`; every host names these attributes alike."""
    return DeltaGeometry(
        hidden_size=layer.hidden_size,
        num_heads=layer.num_v_heads,
        head_dim=layer.head_v_dim,
        n_groups=layer.num_k_heads,
        state_size=layer.head_k_dim,
        conv_kernel=layer.conv_kernel_size,
        tensors=tuple((name, tuple(tensor.shape)) for name, tensor in layer.named_parameters()),
    )


def rules_of(layer: nn.Module, hidden: Tensor) -> dict[str, Callable[..., Any]]:
    """What computes the rule of a layer, swapped or not, for the input `hidden` [B, T, D], by the names in `RULES`."""
    if isinstance(layer, DeltaMixin):
        return dict.fromkeys(RULES, partial(layer.rule, hidden))
    found = _forward_of(type(layer)).__globals__
    return {name: found[name] for name in RULES}


@force_accelerate_hooks("conv1d")
def run_with_rules(layer: nn.Module, rules: Mapping[str, Callable[..., Any]], *args, **kwargs) -> Tensor:
    """The forward of a host's layer, swapped or not, with other functions in the place of those in `RULES`.

    Args:
        layer: the layer.
        rules: what to call, by the names in `RULES`.
        args, kwargs: of the host's forward.

    Raises:
        UsageError: this release of transformers computes the rule in another way.
    """
    own = _forward_of(type(layer))
    bound = types.FunctionType(
        own.__code__, {**own.__globals__, **rules}, own.__name__, own.__defaults__, own.__closure__
    )
    bound.__kwdefaults__ = own.__kwdefaults__
    return bound(layer, *args, **kwargs)


@cache
def _forward_of(layer_class: type[nn.Module]) -> types.FunctionType:
    """The forward that a host's class defines, without its decorators."""
    host = next(one for one in layer_class.__mro__ if not issubclass(one, KeepFp32Mixin))
    forward = inspect.unwrap(host.forward)
    missing = [name for name in RULES if name not in forward.__code__.co_names or name not in forward.__globals__]
    if missing:
        raise UsageError(
            f"{host.__name__} of transformers {__version__} does not call {' or '.join(missing)}, the rule that is "
            "swapped; install a release that does, such as 5.17 or 5.24"
        )
    return forward


@cache
def _swapped_class(layer_class: type[nn.Module]) -> type[nn.Module]:
    _forward_of(layer_class)
    # A kernel of the Hub for the whole layer would take the place of a forward that is no longer the host's.
    name = f"Palimpsa{layer_class.__name__}"
    return type(name, (DeltaMixin, layer_class), {"kernel_layer_name": name, "__module__": __name__})
