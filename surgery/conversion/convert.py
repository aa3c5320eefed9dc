"""checkpoint + plan -> model folder: written a shard at a time, verified as written, then moved into place.

One shard of at most 1 GB is in memory at a time. The folder appears under its name when it is complete and has
passed its verification; a killed or failed run leaves nothing of that name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...base.console import counted
from ...base.errors import ChangedFileError, UsageError, VerificationError
from ...base.files import output_folder, refuse_existing, refuse_to_delete, write_text
from ...base.schemas import write_model
from ...kernels.common.precision import dtype_name
from ..checkpoint.dtypes import STORED, dtype_of
from ..checkpoint.tokenizer import with_tokenizer
from ..measure.forgetting import measure, static_forgetting
from ..measure.plots import plot_profile
from ..measure.profile import Profile, read_profile, write_profile
from ..planning.inits import is_calibrated
from ..planning.plan import DEFAULT_LAYERS, Plan, make_plan, read_plan, write_plan
from .card import CardFacts, checkpoint_facts, kept_readme, render_card
from .model_folder import (
    can_copy,
    copy_weights,
    new_tensors,
    output_config,
    output_specs,
    write_surroundings,
    write_weights,
)
from .report import ConversionReport, build_report
from .verify import Verification, choose_mode
from .verify import verify as verify_folder
from .writer import TensorSpec

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

PLAN_FILE, PROFILE_FILE, PICTURE_FILE = "plan.yaml", "profile.json", "profile.png"
_WRITTEN_AGAIN = (PLAN_FILE, PROFILE_FILE)
REPORT_FILE, CARD_FILE = "surgery_report.json", "README.md"


@dataclass(frozen=True)
class MeasureOptions:
    """How to measure when the plan needs figures that nobody gave; the fields are those of `forgetting.measure`.

    A quarter of the tokens that the stage `measure` takes by itself: enough to rank layers, and four times faster.
    """

    data: str | Path | None = None
    tokens: int = 16384
    seq_len: int = 2048
    seed: int = 0
    device: str = "cpu"
    tokenizer: str | Path | None = None


def convert(
    src: str | Path | Checkpoint,
    out: str | Path,
    *,
    plan: Plan | str | Path | None = None,
    profile: Profile | str | Path | None = None,
    layers: int | Sequence[int] | None = None,
    measuring: MeasureOptions | None = None,
    dtype: str | None = None,
    verify: str = "auto",
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
    **plan_options: Any,
) -> ConversionReport:
    """Swaps mixers of a checkpoint, as its family says for what, and writes the result as a model folder.

    Args:
        src: folder, Hub id, or an open checkpoint; an already converted one keeps its swapped layers.
        out: the folder to make.
        plan: a plan or the path of one; without it one is made from `layers` and `plan_options`.
        profile: figures to choose by, or the path of them. Without it the file beside the plan is used; a count of
            layers or the calibrated start measures first; a list of layers gets the static estimate.
        layers: a count (default 8) or the layers themselves.
        measuring: text and amount for measuring.
        dtype: `float32`, `bfloat16` or `float16` of the stored weights; the source's when None.
        verify: `auto`, `logits`, `layers` or `none`.
        force: replace `out` when it exists.
        revision: of a Hub id.
        token: for a private Hub id.
        **plan_options: as for `make_plan`: rule, init, strength, seed and the keys of the importance gate.

    Returns:
        The report, which is also in the folder.

    Raises:
        OutputExistsError: `out` is there and `force` is false.
        VerificationError: what was written is not the source; nothing is kept.
        UsageError, SchemaError, CheckpointError: options, plan or source that do not fit.
    """
    from ..checkpoint.checkpoint import open_checkpoint

    refuse_existing(out, force=force)
    asked = None if dtype is None else dtype_of(dtype, STORED)
    measuring = measuring or MeasureOptions()
    checkpoint = open_checkpoint(src, revision=revision, token=token) if isinstance(src, str | Path) else src
    # A plan or profile of the old output itself is written there again.
    again = [Path(out).resolve() / name for name in _WRITTEN_AGAIN]
    kept = [one for one in (plan, profile) if isinstance(one, str | Path) and Path(one).resolve() not in again]
    refuse_to_delete(out, checkpoint.path, measuring.data, measuring.tokenizer, *kept)
    checkpoint = with_tokenizer(checkpoint, measuring.tokenizer, token=token)
    measuring = replace(measuring, tokenizer=None)  # it is the checkpoint's own from here on
    mode = choose_mode(checkpoint, verify)
    plan, profile = _settle(checkpoint, plan, profile, layers, plan_options, measuring)
    return _write(checkpoint, Path(out), plan, profile, asked, mode, force)


def _settle(
    checkpoint: Checkpoint,
    plan: Plan | str | Path | None,
    profile: Profile | str | Path | None,
    layers: int | Sequence[int] | None,
    options: dict[str, Any],
    measuring: MeasureOptions,
) -> tuple[Plan, Profile]:
    """The plan and the profile that goes with it, made where they were not given."""
    options = {key: value for key, value in options.items() if value is not None}
    if isinstance(profile, str | Path):
        profile = read_profile(profile)
    if plan is not None:
        given = [f"--{key.replace('_', '-')}" for key in ("layers", *options) if key in options or layers is not None]
        if given:
            raise UsageError(f"{', '.join(given)}: the plan holds that already; edit the plan, or leave it out")
        where = str(plan) if isinstance(plan, str | Path) else PLAN_FILE
        if isinstance(plan, str | Path):
            profile = profile or _profile_beside(Path(plan), checkpoint)
            plan = read_plan(plan)
        plan.check_source(checkpoint, where)
        if profile is not None:
            profile.check_source(checkpoint)
        if profile is None and is_calibrated(plan.init):
            return plan, _measure(checkpoint, measuring, True)
        _say_unused(measuring)
        return plan, profile or static_forgetting(checkpoint)
    layers = DEFAULT_LAYERS if layers is None else layers
    calibrate = is_calibrated(options.get("init"))
    if profile is None and (isinstance(layers, int) or calibrate):
        # A count that cannot be met, or options that contradict, should not wait for the measurement.
        make_plan(checkpoint, static_forgetting(checkpoint), layers=layers, **options)
        profile = _measure(checkpoint, measuring, calibrate)
    else:
        _say_unused(measuring)
    plan = make_plan(checkpoint, profile, layers=layers, **options)
    return plan, profile or static_forgetting(checkpoint)


def _say_unused(measuring: MeasureOptions) -> None:
    """Names options on the text where nothing is measured."""
    usual = MeasureOptions()
    keys = ("data", "tokens", "seq_len")
    asked = [f"--{key.replace('_', '-')}" for key in keys if getattr(measuring, key) != getattr(usual, key)]
    if asked:
        logger.warning(
            "%s: not used, as nothing is measured: the layers are listed, or their figures given", ", ".join(asked)
        )


def _measure(checkpoint: Checkpoint, measuring: MeasureOptions, calibrate: bool) -> Profile:
    return measure(checkpoint, calibrate=calibrate, **asdict(measuring))


def _profile_beside(plan: Path, checkpoint: Checkpoint) -> Profile | None:
    path = plan.parent / PROFILE_FILE
    if not path.is_file():
        return None
    profile = read_profile(path)
    if not checkpoint.matches(profile.fingerprint):
        logger.warning("%s beside the plan is of another checkpoint (%s) and is not used", path.name, profile.source)
        return None
    return profile


def _write(
    checkpoint: Checkpoint,
    out: Path,
    plan: Plan,
    profile: Profile,
    asked: torch.dtype | None,
    mode: str,
    force: bool,
) -> ConversionReport:
    config, dtype = output_config(checkpoint, plan), asked or checkpoint.dtype
    specs = output_specs(checkpoint, config, asked if checkpoint.family.copied else dtype)
    copied = can_copy(checkpoint, specs)
    notes = (*checkpoint.notes, *checkpoint.family.remarks(config), *_rounding_note(checkpoint, specs))
    for note in notes[len(checkpoint.notes) :]:
        logger.warning(note)
    readme = kept_readme(out)
    with output_folder(out, force=force) as folder:
        write = copy_weights if copied else write_weights
        files = write(checkpoint, folder, specs, new_tensors(checkpoint, plan, profile))
        plot_profile(profile, folder / PICTURE_FILE, chosen=plan.layers)
        write_surroundings(checkpoint, folder, config, dtype)
        write_plan(plan, folder / PLAN_FILE)
        write_profile(profile, folder / PROFILE_FILE)
        verification = _verified(checkpoint, folder, plan, mode)
        report = build_report(
            checkpoint,
            plan,
            specs,
            version=_version(),
            palimpsa_layers=config.palimpsa_layers,
            dtype=dtype,
            weight_files=files,
            verification=verification,
            notes=notes,
            whole_files=copied,
        )
        write_model(report, folder / REPORT_FILE)
        write_text(folder / CARD_FILE, readme or _card(checkpoint, out.resolve().name, plan, profile, report))
    swapped = ", ".join(str(layer) for layer in plan.layers)
    logger.info("%s: %s swapped (%s)", out.name, counted(len(plan.layers), "layer"), swapped)
    return report


def _verified(checkpoint: Checkpoint, folder: Path, plan: Plan, mode: str) -> Verification:
    """Verifies; a folder that cannot even be read back is a failed verification too."""
    try:
        return verify_folder(checkpoint, folder, plan, mode=mode)
    except (VerificationError, ChangedFileError):
        raise
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise VerificationError(f"what was written cannot be read back ({error}); nothing was kept") from error


def _rounding_note(checkpoint: Checkpoint, specs: list[TensorSpec]) -> tuple[str, ...]:
    rounded = [
        spec.name
        for spec in specs
        if spec.name in checkpoint.tensors and not _holds(spec.dtype, checkpoint.tensors[spec.name].dtype)
    ]
    if not rounded:
        return ()
    stored = dtype_name(next(spec.dtype for spec in specs if spec.name == rounded[0]))
    hint = "" if stored == "float32" else "; give --dtype float32 to keep the source's digits"
    return (f"rounded to {stored}: {counted(len(rounded), 'tensor')} (such as {rounded[0]}){hint}",)


def _holds(stored: torch.dtype, source: torch.dtype) -> bool:
    """Whether every value of `source` is one of `stored`: neither of bfloat16 and float16 holds the other."""
    return torch.promote_types(stored, source) == stored


def _card(checkpoint: Checkpoint, name: str, plan: Plan, profile: Profile, report: ConversionReport) -> str:
    return render_card(
        CardFacts(
            name=name,
            plan=plan,
            swapped=report.palimpsa_layers,
            dtype=report.dtype,
            **checkpoint_facts(checkpoint),
            profile=profile,
            verification=report.verification_lines(),
        )
    )


def _version() -> str:
    from ... import __version__

    return __version__
