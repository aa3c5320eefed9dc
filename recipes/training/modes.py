"""Training modes: a loaded model becomes one in which the right parameters train, in the right types."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...base.console import counted, human_count, table
from ...base.errors import UsageError
from ...mixers.geometry import GATE
from ...modeling.hybrids.hosts import HOSTS, host_type, is_delta, is_hybrid, mixer_paths
from ...surgery.checkpoint.checkpoint import Checkpoint
from .optim import describe_selection, select_parameters
from .recipe import ADAPTER_MODES, Recipe

logger = logging.getLogger(__name__)

_MAMBA2_PROJECTIONS = ("in_proj", "out_proj")


@dataclass(frozen=True)
class Coverage:
    """How many layers of each kind an adapter target matches."""

    target: str
    swapped: int
    source: int


def prepare_mode(model: nn.Module, checkpoint: Checkpoint, recipe: Recipe) -> nn.Module:
    """Sets what trains, casts to the types of the recipe, and says what will happen.

    Trained parameters are fp32, whatever the precision: they are the master weights, and bf16 is what products are
    computed in. Frozen matrices keep the source's dtype when the precision is bf16, which loses nothing.

    Returns:
        The model, or a PEFT model around it.
    """
    layers = list(checkpoint.palimpsa_layers)
    if recipe.mode in ADAPTER_MODES:
        model = add_adapters(model, recipe, layers)
    select_parameters(model, recipe.mode, layers, train_prior=model.config.train_prior)
    keep_short = recipe.precision == "bf16" and checkpoint.dtype == torch.bfloat16
    for parameter in model.parameters():
        if parameter.requires_grad or not keep_short:
            parameter.data = parameter.data.float()
    model.config.use_cache = False
    if recipe.gradient_checkpointing:
        # Renamed in transformers 5.24; a PEFT model passes either name on.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    selection = describe_selection(model, recipe)
    logger.info(
        "mode %s: %s parameters train (%s), %s are frozen",
        recipe.mode,
        human_count(selection.trained),
        "; ".join(f"{name}: {counted(len(names), 'tensor')}" for name, names in selection.groups.items()),
        human_count(selection.frozen),
    )
    return model


def check_packing(model: nn.Module, recipe: Recipe) -> None:
    """Refuses documents kept apart where a hybrid's own layers would carry text from one to the next.

    Raises:
        UsageError: its attention does, or its layers of a Gated DeltaNet.
    """
    if recipe.data.packing != "documents" or not is_hybrid(model.config):
        return
    host, paths = HOSTS[host_type(model.config)], mixer_paths(model.config)
    if not host.keeps_documents_apart and len(paths) < model.config.num_hidden_layers:
        raise UsageError(
            f"data.packing: the attention of {host_type(model.config)} in transformers reads across the documents of a "
            "sequence; set data.packing=stream"
        )
    if host.delta:
        raise UsageError(
            f"data.packing: transformers keeps the documents of {host_type(model.config)} apart with kernels that are "
            "not tested here; set data.packing=stream"
        )


def add_adapters(model: nn.Module, recipe: Recipe, layers: list[int]) -> nn.Module:
    """LoRA on the recipe's targets, and the new parameters trained whole and stored with the adapter.

    Raises:
        UsageError: PEFT is not installed, or the targets make no sense for this model (see `check_coverage`).
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError(
            f"mode {recipe.mode} needs the package peft, which is not installed; install palimpsa-surgery[train]"
        ) from error
    rows = coverage(model, recipe.lora.targets, layers)
    logger.info("%s", coverage_table(rows, layers, model))
    check_coverage(rows, recipe, layers, tied=model.config.tie_word_embeddings, projections=_projections(model))
    check_kinds(model, recipe.lora.targets)
    check_shared(model, recipe.lora.targets)
    config = LoraConfig(
        r=recipe.lora.rank,
        lora_alpha=recipe.lora.alpha,
        lora_dropout=recipe.lora.dropout,
        target_modules=_by_path(model, recipe.lora.targets),
        modules_to_save=[GATE] if layers else None,
        task_type="CAUSAL_LM",
    )
    if recipe.mode == "qlora":
        quantize_frozen(model)
    return get_peft_model(model, config)


def matches(model: nn.Module, targets: list[str]) -> Iterator[tuple[str, str, nn.Module]]:
    """Target, name and module of all that the targets name, where an adapter can be."""
    for name, module in model.named_modules():
        for target in targets:
            if name == target or name.endswith(f".{target}"):
                yield target, name, module


def _by_path(model: nn.Module, targets: list[str]) -> list[str]:
    """What PEFT is told: the targets, or for hybrids every module by its full name."""
    return sorted({name for _, name, _ in matches(model, targets)}) if is_hybrid(model.config) else list(targets)


def coverage(model: nn.Module, targets: list[str], layers: list[int]) -> list[Coverage]:
    """For each target, how many swapped and how many source layers hold a module of that name."""
    found: dict[str, set[int]] = {target: set() for target in targets}
    elsewhere: dict[str, int] = dict.fromkeys(targets, 0)
    for target, name, _ in matches(model, targets):
        number = _layer_of(name)
        if number is None:
            elsewhere[target] += 1
        else:
            found[target].add(number)
    return [
        Coverage(target, len(found[target] & set(layers)), len(found[target] - set(layers)) + elsewhere[target])
        for target in targets
    ]


def coverage_table(rows: list[Coverage], layers: list[int], model: nn.Module) -> str:
    """What the adapters cover, as a table to read before training starts."""
    total = model.config.num_hidden_layers
    others = counted(total - len(layers), "layer")
    headers = ("adapter on", f"swapped layers (of {len(layers)})", f"other modules (of {others})")
    return table([(row.target, row.swapped, row.source) for row in rows], headers)


def check_kinds(model: nn.Module, targets: list[str]) -> None:
    """Refuses targets that are no matrices: a low rank is one of a matrix, and only those are merged.

    Raises:
        UsageError: naming the target and what it is.
    """
    for target, _, module in matches(model, targets):
        if not isinstance(module, nn.Linear):
            raise UsageError(
                f"lora.targets: {target} is a {type(module).__name__}, expected a linear layer such as in_proj or "
                "out_proj; leave it out"
            )


def check_shared(model: nn.Module, targets: list[str]) -> None:
    """Refuses targets in blocks that several layers share: each would get an adapter of its own on one matrix.

    Raises:
        UsageError: naming the target.
    """
    users = Counter(id(module.weight) for module in model.modules() if isinstance(module, nn.Linear))
    for target, name, module in matches(model, targets):
        if users[id(module.weight)] > 1:
            raise UsageError(
                f"lora.targets: {target} is shared between layers ({name} is one of {users[id(module.weight)]} uses of "
                "its matrix), and merged adapters would change it in all of them; leave it out"
            )


def _projections(model: nn.Module) -> tuple[str, ...]:
    """What the projections are called that every mixer has."""
    if not is_delta(model.config):
        return _MAMBA2_PROJECTIONS
    layer = model.get_submodule(next(iter(mixer_paths(model.config).values())))
    return tuple(name for name, module in layer.named_children() if isinstance(module, nn.Linear))


def check_coverage(
    rows: list[Coverage],
    recipe: Recipe,
    layers: list[int],
    *,
    tied: bool,
    projections: Sequence[str] = _MAMBA2_PROJECTIONS,
) -> None:
    """Refuses targets that match nothing, miss all swapped layers, or sit on one matrix that is used twice.

    `projections` are named to who has to choose others.

    Raises:
        UsageError: naming the target.
    """
    for row in rows:
        if tied and row.target in ("lm_head", "embeddings", "embed_tokens"):
            raise UsageError(
                f"lora.targets: {row.target} is tied (head and embedding are one matrix), and an adapter on it would"
                " change only one of them; leave it out"
            )
        if GATE in row.target or row.target in ("beta_down", "beta_up"):
            raise UsageError(
                f"lora.targets: {row.target} is new and is trained whole beside the adapters; leave it out"
            )
        if not row.swapped and not row.source:
            raise UsageError(
                f"lora.targets: {row.target} matches no module; {' and '.join(projections)} are in every mixer"
            )
    if layers and not any(row.swapped for row in rows) and not recipe.lora.force:
        raise UsageError(
            f"lora.targets: none of them is in a swapped layer; add {' or '.join(projections)}, or set lora.force=true"
        )


def quantize_frozen(model: nn.Module) -> None:
    """Stores every `in_proj` in 4 bits (NF4); out_proj, conv1d, lm_head and all that is new stay as they are.

    Raises:
        UsageError: bitsandbytes is not installed, or there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise UsageError("mode qlora needs a CUDA device; take mode=lora")
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        raise UsageError(
            "mode qlora needs the package bitsandbytes, which is not installed; install palimpsa-surgery[qlora]"
        ) from error
    for parent in list(model.modules()):
        source = parent._modules.get("in_proj")
        if not isinstance(source, nn.Linear):
            continue
        short = Linear4bit(
            source.in_features,
            source.out_features,
            bias=source.bias is not None,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
        )
        short.weight = Params4bit(source.weight.data, requires_grad=False, quant_type="nf4")
        if source.bias is not None:
            short.bias = source.bias
        parent.in_proj = short


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    for before, part in itertools.pairwise(parts):
        if before == "layers" and part.isdigit():
            return int(part)
    return None
