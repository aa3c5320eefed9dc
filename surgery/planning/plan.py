"""plan.yaml: the surgery as data, complete before a tensor moves, meant to be read and edited by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StrictBool, ValidationInfo, field_validator, model_validator

from ...base.console import counted
from ...base.errors import SchemaError, UsageError
from ...base.files import write_text
from ...base.schemas import StrictModel, current_version, dump_yaml, option_name, read_model, validate_model
from ...mixers.geometry import SCALE_FORMS, GateSpec
from ..measure.profile import Profile
from .inits import DEFAULT_INIT, INITS, is_calibrated
from .strategies import DEFAULT_RULE, RULES, check_rule, choose_layers

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

EXPLICIT = "explicit"
DEFAULT_LAYERS = 8
_MOST_DIGITS = 9
DEFAULT_STRENGTH = 0.1
OPTIONS = ("layers", "rule", "init", "strength", "beta_rank", "beta_groups", "seed")
"""Keys that the command line has an option for."""
Whole = Annotated[int, Field(strict=True)]
"""YAML's true is no 1."""
Index = Annotated[Whole, Field(ge=0)]

HEADER = """\
# Which layers of {source} are swapped, and how they start. Edit it by hand as you like.
#   layers           numbers from 0, without those that are swapped already
#   rule             how they were chosen ({rules}), or "explicit"
#   init             what the swapped layers keep of the source at first:
{inits}
#   beta_rank        rank R of the importance gate; beta_groups: importances per head, a divisor of head_dim
#   beta_scale_form  abs or softplus; train_prior: whether fine-tuning moves the prior; seed: of the random parts
"""


class Plan(StrictModel):
    """The file plan.yaml; `HEADER` says what each key means to the person who edits it.

    Attributes:
        fingerprint: of the checkpoint that the plan was made for.
        strength: mean importance growth E[J] / I_prior of the calibrated start; null for the other starts.
        reasons: one line for each layer; a reason of a layer that is not listed any more is dropped on reading.
    """

    source: str
    fingerprint: str
    rule: str = EXPLICIT
    layers: Annotated[tuple[Index, ...], Field(min_length=1)]
    init: Literal[tuple(INITS)] = DEFAULT_INIT
    strength: Annotated[Annotated[float, Field(gt=0, le=10, strict=True)] | None, Field(validate_default=True)] = None
    beta_rank: Annotated[Whole, Field(ge=1)]
    beta_groups: Annotated[Whole, Field(ge=1)]
    beta_scale_form: Literal[SCALE_FORMS] = "abs"
    train_prior: StrictBool = True
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = 0
    reasons: dict[int, str] = Field(default_factory=dict)

    @field_validator("layers")
    @classmethod
    def _sorted_once(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        twice = sorted({layer for layer in layers if layers.count(layer) > 1})
        if twice:
            raise ValueError(f"layer {twice[0]} is listed twice; list each layer once")
        return tuple(sorted(layers))

    @field_validator("rule")
    @classmethod
    def _known_rule(cls, rule: str) -> str:
        if rule not in (*RULES, EXPLICIT):
            raise ValueError(f"no such rule {rule!r}; choose one of {', '.join(RULES)}, {EXPLICIT}")
        return rule

    @field_validator("strength")
    @classmethod
    def _of_the_calibrated_start(cls, strength: float | None, others: ValidationInfo) -> float | None:
        init = others.data.get("init")
        if is_calibrated(init) and strength is None:
            raise ValueError(f"is missing; init {init} needs it, for example {DEFAULT_STRENGTH}")
        if init is not None and not is_calibrated(init) and strength is not None:
            able = " or ".join(filter(is_calibrated, INITS))
            raise ValueError(f"belongs to init {able}, not to {init}; leave it out, or make it null in a plan")
        return strength

    @field_validator("beta_scale_form")
    @classmethod
    def _has_a_gradient(cls, form: str, others: ValidationInfo) -> str:
        init = others.data.get("init")
        if form == "softplus" and init is not None and INITS[init].exact:
            raise ValueError(f"is softplus, but init {init} needs abs: a softplus that small has no gradient left")
        return form

    @model_validator(mode="after")
    def _without_stale_reasons(self) -> Plan:
        kept = {layer: self.reasons[layer] for layer in self.layers if layer in self.reasons}
        if kept != self.reasons:
            object.__setattr__(self, "reasons", kept)
        return self

    @property
    def gate(self) -> GateSpec:
        """The importance gate of the layers, as one object."""
        return GateSpec.of(self)

    def check_source(self, checkpoint: Checkpoint, where: str = "plan.yaml") -> None:
        """Raises unless the plan was made for this checkpoint and can be carried out on it.

        Args:
            checkpoint: the source.
            where: the file that the message names.

        Raises:
            SchemaError: another fingerprint, a layer out of range or swapped already, sizes that do not fit the model.
        """
        if not checkpoint.matches(self.fingerprint):
            raise SchemaError(
                f"{where}:fingerprint: the plan was made for {self.source} ({self.fingerprint[:12]}), not for "
                f"{checkpoint.source_id} ({checkpoint.fingerprint[:12]}); make a plan for this checkpoint"
            )
        for key, fault in self._misfits(checkpoint):
            raise SchemaError(f"{where}:{key}: {fault}")

    def _misfits(self, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        """The keys that this checkpoint cannot have as they are, each with what is wrong."""
        for fault in _bad_layers(self.layers, checkpoint):
            yield "layers", fault
        for site in (checkpoint.sites[layer] for layer in self.layers if layer in checkpoint.sites):
            yield from self.gate.misfits(site.geometry.hidden_size, site.geometry.gate_channels)
        if checkpoint.family.exact_only and not INITS[self.init].exact:
            exact = ", ".join(name for name, init in INITS.items() if init.exact)
            yield "init", f"{self.init} {checkpoint.family.exact_only}; choose {exact}"
        own = checkpoint.config.gate.keys() if checkpoint.palimpsa_layers else {}
        for key, theirs in own.items():
            if (mine := getattr(self, key)) != theirs:
                yield (
                    key,
                    f"{mine} differs from {theirs}, which the swapped layers of {checkpoint.source_id} have; one model "
                    f"has one {key}, so keep theirs",
                )


def parse_layers(text: str) -> int | tuple[int, ...]:
    """`8` is a count, `8,` and `4,8,11` are lists of layers.

    Raises:
        UsageError: not numbers, negative, empty or with a layer twice.
    """
    parts = [part.strip() for part in text.split(",")]
    is_list = len(parts) > 1
    if is_list and parts[-1] == "":
        parts.pop()
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"--layers {text}: expected a count such as 8, or a list such as 4,8,11 (one layer: 8,)")
    longest = max(map(len, parts))
    if longest > _MOST_DIGITS:
        raise UsageError(f"--layers {text[:12]}...: has a number of {longest:,} digits; no model has so many layers")
    numbers = tuple(int(part) for part in parts)
    if not is_list:
        if numbers[0] < 1:
            raise UsageError(f"--layers {text}: the count must be at least 1 (layer 0 alone is written 0,)")
        return numbers[0]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise UsageError(f"--layers {text}: layer {twice[0]} is listed twice; list each layer once")
    return numbers


def _bad_layers(layers: Sequence[int], checkpoint: Checkpoint) -> Iterator[str]:
    """What is wrong with each layer that the model has not, that has no mixer, or that is swapped already."""
    family, num_layers, swapped = checkpoint.family, checkpoint.num_layers, checkpoint.palimpsa_layers
    for layer in layers:
        if layer >= num_layers:
            yield f"layer {layer}: the model has {counted(num_layers, 'layer')}, 0 to {num_layers - 1}"
        elif layer >= 0 and layer not in checkpoint.sites:
            kind = family.kind(checkpoint.config, layer)
            yield f"layer {layer}: has no mixer to swap (a layer of kind: {kind}); choose layers of {family.plain}"
        if layer in swapped:
            listed = ", ".join(str(number) for number in swapped)
            yield f"layer {layer}: is {family.swapped} already (swapped: {listed}); choose plain {family.plain} layers"


def make_plan(
    checkpoint: Checkpoint,
    profile: Profile | None = None,
    *,
    layers: int | Sequence[int] = DEFAULT_LAYERS,
    rule: str = DEFAULT_RULE,
    init: str = DEFAULT_INIT,
    strength: float | None = None,
    beta_rank: int | None = None,
    beta_groups: int | None = None,
    beta_scale_form: str | None = None,
    train_prior: bool | None = None,
    seed: int = 0,
) -> Plan:
    """Chooses the layers and completes every number of the surgery.

    Args:
        checkpoint: the source.
        profile: its profile; needed when `layers` is a count.
        layers: a count for `rule`, or the layers themselves (then `rule` is not used).
        rule: a key of `strategies.RULES`.
        init: a key of `INITS`.
        strength: mean importance growth of the calibrated start, `DEFAULT_STRENGTH` when None.
        beta_rank, beta_groups, beta_scale_form, train_prior: as in `GateSpec.complete`; by default a converted
            source's own, and the scale form by `INITS`.
        seed: of random draws: the rule `random`, and the starts.

    Raises:
        UsageError: layers that do not exist or are swapped, a count without a profile, options that contradict.
        SchemaError: a profile of another checkpoint.
    """
    check_rule(rule)
    if profile is not None:
        profile.check_source(checkpoint)
    if isinstance(layers, int):
        if profile is None:
            raise UsageError(
                f"--layers {layers}: a count needs a profile to choose by; measure first, or list the layers"
            )
        choice = choose_layers(profile, layers, rule, seed=seed)
        rule, layers, reasons = choice.rule, choice.layers, choice.reasons
    else:
        for fault in _bad_layers(layers, checkpoint):
            raise UsageError(f"--layers: {fault}")
        if rule != DEFAULT_RULE:
            logger.warning("--rule %s: not used, as the layers are listed", rule)
        rule, reasons = EXPLICIT, {layer: _asked_for(profile, layer) for layer in layers}
    if is_calibrated(init) and strength is None:
        strength = DEFAULT_STRENGTH
    said = (beta_rank, beta_groups, beta_scale_form, train_prior)
    gate = {key: value for key, value in zip(GateSpec.KEYS, said, strict=True) if value is not None}
    inherited = checkpoint.config.gate.keys() if checkpoint.palimpsa_layers else {}
    usual = inherited or {"beta_scale_form": INITS[init].scale_form if init in INITS else None}
    geometry = next(iter(checkpoint.sites.values())).geometry
    values = {
        "source": checkpoint.source_id,
        "fingerprint": checkpoint.fingerprint,
        "rule": rule,
        "layers": tuple(layers),
        "init": init,
        "strength": strength,
        **GateSpec.complete(geometry.hidden_size, geometry.gate_channels, **(usual | gate)).keys(),
        "seed": seed,
        "reasons": reasons,
    }
    values["schema_version"] = current_version(Plan)
    plan = validate_model(Plan, values, "plan", error=UsageError, options=OPTIONS)
    for key, fault in plan._misfits(checkpoint):
        raise UsageError(f"{option_name(key) if key in OPTIONS else f'plan:{key}'}: {fault}")
    return plan


def _asked_for(profile: Profile | None, layer: int) -> str:
    return "asked for" if profile is None else f"asked for, window {profile.of(layer).window:.4g} tokens"


def write_plan(plan: Plan, path: str | Path) -> None:
    """Writes plan.yaml, with a heading that explains its keys."""
    inits = "\n".join(f"#     {name:<14} {init.meaning.format(strength='`strength`')}" for name, init in INITS.items())
    write_text(path, HEADER.format(source=plan.source, rules=", ".join(RULES), inits=inits) + dump_yaml(plan))


def read_plan(path: str | Path) -> Plan:
    """Reads plan.yaml; `SchemaError` names file and key of a mistake, and the nearest key that exists."""
    return read_model(Plan, path)
