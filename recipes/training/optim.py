"""Which parameters train, at which learning rate, with which weight decay; and the schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...base.errors import UsageError
from ...mixers.geometry import GATE, GATE_FP32, MIXER_FP32
from .recipe import Recipe

NEW = f".{GATE}."
"""Every parameter that surgery adds lives in a sub-module of this name."""

KEPT = (*MIXER_FP32, *GATE_FP32, "bias", "conv1d", "embeddings", "embed_tokens", "lm_head")
"""What does not decay, beside norms. A_log, D, dt_bias, the scale and the prior are rates, for which zero means
something; biases are offsets; the four taps of a convolution are a filter; and the row of a rare token in the embedding
would only shrink. The rest are matrices that map features to features."""

EPS, EPS_NEW = 1e-8, 1e-12
"""Adam's epsilon. At the identity start the gradients of W_down and W_up are in proportion to a beta of nearly nothing;
the usual epsilon would outweigh them until the scale has grown."""


@dataclass(frozen=True)
class Selection:
    """What a mode trains: parameter names by group, and counts."""

    groups: dict[str, tuple[str, ...]]
    trained: int
    frozen: int


def is_new(name: str) -> bool:
    """Whether surgery added this parameter."""
    return NEW in f".{name}"


def decays(name: str) -> bool:
    """Whether weight decay applies: see `KEPT`."""
    return not any(part in KEPT or "norm" in part for part in name.split("."))


def swapped_parts(config: Any, layers: Sequence[int]) -> tuple[str, ...]:
    """What the names of the parameters of these layers' mixers, and of the norms before them, have in them."""
    from ...modeling.hybrids.hosts import is_hybrid, mixer_path, norm_path

    if not is_hybrid(config):
        return tuple(f".layers.{layer}." for layer in layers)
    return tuple(f".{path(config, layer)}." for layer in layers for path in (norm_path, mixer_path))


def select_parameters(model: nn.Module, mode: str, layers: list[int], *, train_prior: bool = True) -> None:
    """Sets `requires_grad` of every parameter by the mode; `lora` and `qlora` keep what PEFT has set.

    Args:
        model: a causal LM (or a PEFT model around one).
        mode: "full", "new", "new+swapped", "lora" or "qlora".
        layers: the swapped layers.
        train_prior: whether log_prior trains.

    Raises:
        UsageError: the mode trains only what surgery added, and nothing was swapped.
    """
    if mode != "full" and not layers:
        raise UsageError(
            f"mode: {mode} trains the swapped layers, and the model has none; convert it first, or set mode=full"
        )
    swapped = swapped_parts(model.config, layers)
    for name, parameter in model.named_parameters():
        if mode in ("lora", "qlora"):
            trains = parameter.requires_grad
        elif mode == "full":
            trains = True
        else:
            trains = is_new(name) or (mode == "new+swapped" and any(part in f".{name}" for part in swapped))
        if name.endswith("log_prior") and not train_prior:
            trains = False
        parameter.requires_grad_(trains)


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """AdamW's groups of what trains: source and new parameters, each with and without weight decay.

    Each group carries `name`, `names` (of its parameters) and `base_lr`, which the schedule scales.

    Raises:
        UsageError: nothing trains.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        lr = recipe.lr_new if is_new(name) else recipe.lr
        decay = recipe.weight_decay if decays(name) else 0.0
        key = f"{'new' if is_new(name) else 'source'}{'' if decays(name) else ', no decay'}"
        eps = EPS_NEW if is_new(name) else EPS
        group = groups.setdefault(
            key, {"name": key, "names": [], "params": [], "lr": lr, "base_lr": lr, "weight_decay": decay, "eps": eps}
        )
        group["names"].append(name)
        group["params"].append(parameter)
    if not groups:
        raise UsageError(f"mode: {recipe.mode} leaves nothing to train in this model; choose another mode")
    return list(groups.values())


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW over `parameter_groups`."""
    return torch.optim.AdamW(parameter_groups(model, recipe), lr=recipe.lr, betas=recipe.betas)


def describe_selection(model: nn.Module, recipe: Recipe) -> Selection:
    """Counts of what trains and what does not, and the names of each group."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    groups = {group["name"]: tuple(group["names"]) for group in parameter_groups(model, recipe)}
    return Selection(groups=groups, trained=trained, frozen=total - trained)


def lr_factor(step: int, recipe: Recipe) -> float:
    """What the learning rates are multiplied with at optimiser step `step` (0-based).

    Linear warmup from 1/warmup to 1, then constant, or a cosine down to `min_lr_ratio` at the last step. A function of
    the step alone: nothing to save, nothing to resume.
    """
    warmup, total = recipe.warmup_steps(), recipe.total_steps()
    if step < warmup:
        return (step + 1) / warmup
    if recipe.schedule == "constant":
        return 1.0
    done = (step - warmup) / max(1, total - 1 - warmup)
    return recipe.min_lr_ratio + (1 - recipe.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def set_lr(optimizer: torch.optim.Optimizer, step: int, recipe: Recipe) -> dict[str, float]:
    """Sets each group's learning rate for `step`; returns them by group name."""
    factor = lr_factor(step, recipe)
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    return {group["name"]: group["lr"] for group in optimizer.param_groups}
