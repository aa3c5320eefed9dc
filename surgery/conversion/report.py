"""surgery_report.json: what a conversion did with every tensor, and how the result was verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, model_validator

from ...base.schemas import StrictModel, StrictPart
from ...kernels.common.precision import dtype_name

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint
    from ..planning.plan import Plan
    from .verify import Verification
    from .writer import TensorSpec

Count = Annotated[int, Field(ge=0)]


class TransformedTensor(StrictPart):
    """A tensor whose bytes changed, and how."""

    name: str
    source: str
    how: str


class DroppedTensor(StrictPart):
    """A source tensor that the output does not hold, and why."""

    source: str
    reason: str


class CreatedTensor(StrictPart):
    """A tensor that the surgery made."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class TensorAccounts(StrictPart):
    """Four lists that add up: copied + transformed + dropped is the source, copied + transformed + created the output.

    Attributes:
        copied: output name to source name, same bytes.
    """

    source_count: Count
    output_count: Count
    copied: dict[str, str]
    transformed: list[TransformedTensor]
    dropped: list[DroppedTensor]
    created: list[CreatedTensor]

    @model_validator(mode="after")
    def _add_up(self) -> TensorAccounts:
        kept = len(self.copied) + len(self.transformed)
        if kept + len(self.dropped) != self.source_count or kept + len(self.created) != self.output_count:
            raise ValueError(
                f"{len(self.copied)} copied, {len(self.transformed)} transformed, {len(self.dropped)} dropped and "
                f"{len(self.created)} created do not add up to {self.source_count} in and {self.output_count} out"
            )
        return self


class VerificationReport(StrictPart):
    """Figures of `verify.Verification`, relative L2 in fp32; None when that was not compared."""

    mode: str
    compared: str
    off_error: float | None
    on_error: float | None
    layers: dict[int, tuple[float, float]]
    tensors: Count


class ConversionReport(StrictModel):
    """The file surgery_report.json.

    Attributes:
        version: of this package.
        layers: swapped by this conversion.
        palimpsa_layers: all swapped layers of the output.
        parameters: of the output; `added` of them are new.
        notes: what a user should know.
    """

    version: str
    source: str
    source_layout: str
    source_fingerprint: str
    layers: tuple[int, ...]
    palimpsa_layers: tuple[int, ...]
    init: str
    strength: float | None
    dtype: str
    parameters: Count
    added: Count
    weight_files: tuple[str, ...]
    tensors: TensorAccounts
    verification: VerificationReport
    notes: tuple[str, ...]

    def verification_lines(self) -> dict[str, str]:
        """The figures as lines for people; empty when nothing was verified."""
        check = self.verification
        if check.mode == "none":
            return {}
        return {
            f"{check.tensors} source tensors": "all there, unchanged or rounded to the stored dtype",
            f"metaplasticity off, {check.compared}": f"relative error {check.off_error:.2e}",
            f"metaplasticity on, {check.compared}": f"relative error {check.on_error:.2e}",
        }


def account(checkpoint: Checkpoint, specs: list[TensorSpec], *, whole_files: bool = False) -> TensorAccounts:
    """Sorts every tensor of source and output into the four lists.

    Where whole files were copied, what the model does not need came along.
    """
    copied, transformed, created = {}, [], []
    for spec in specs:
        entry = checkpoint.tensors.get(spec.name)
        if entry is None:
            created.append(CreatedTensor(name=spec.name, shape=spec.shape, dtype=dtype_name(spec.dtype)))
            continue
        how = _changes(checkpoint, entry, spec)
        if how:
            transformed.append(TransformedTensor(name=spec.name, source=entry.source_name, how=how))
        else:
            copied[spec.name] = entry.source_name
    unused = dict(checkpoint.dropped)
    copied |= {name: name for name in unused if whole_files}
    dropped = [DroppedTensor(source=name, reason=reason) for name, reason in unused.items() if not whole_files]
    return TensorAccounts(
        source_count=len(checkpoint.tensors) + len(unused),
        output_count=len(copied) + len(transformed) + len(created),
        copied=copied,
        transformed=transformed,
        dropped=dropped,
        created=created,
    )


def _changes(checkpoint: Checkpoint, entry: object, spec: TensorSpec) -> str:
    changes = []
    if transformed := checkpoint.transformed(entry.name):
        changes.append(transformed)
    if entry.dtype != spec.dtype:
        changes.append(f"{dtype_name(entry.dtype)} to {dtype_name(spec.dtype)}")
    return ", ".join(changes)


def build_report(
    checkpoint: Checkpoint,
    plan: Plan,
    specs: list[TensorSpec],
    *,
    version: str,
    palimpsa_layers: tuple[int, ...],
    dtype: torch.dtype,
    weight_files: tuple[str, ...],
    verification: Verification,
    notes: tuple[str, ...],
    whole_files: bool = False,
) -> ConversionReport:
    """The report of one conversion; `whole_files` as for `account`."""
    accounts = account(checkpoint, specs, whole_files=whole_files)
    created = {tensor.name for tensor in accounts.created}
    sizes = {spec.name: torch.Size(spec.shape).numel() for spec in specs}
    return ConversionReport(
        version=version,
        source=checkpoint.source_id,
        source_layout=checkpoint.layout,
        source_fingerprint=checkpoint.fingerprint,
        layers=plan.layers,
        palimpsa_layers=palimpsa_layers,
        init=plan.init,
        strength=plan.strength,
        dtype=dtype_name(dtype),
        parameters=sum(sizes.values()),
        added=sum(size for name, size in sizes.items() if name in created),
        weight_files=weight_files,
        tensors=accounts,
        verification=VerificationReport(
            mode=verification.mode,
            compared=verification.on,
            off_error=verification.off_error,
            on_error=verification.on_error,
            layers=verification.layers,
            tensors=verification.tensors,
        ),
        notes=notes,
    )
