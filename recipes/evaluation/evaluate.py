"""`palimpsa evaluate`: suites of measurements of a model, beside those of another one on the same questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...base.console import progress
from ...base.errors import OutputError, PalimpsaError, UsageError
from ...base.files import named_path, refuse_existing, refuse_file_name, refuse_to_replace
from ...base.text import data_name
from ...kernels.backends import describe_device
from ...kernels.common.precision import dtype_name
from ...kernels.metaplastic.scan import METAPLASTIC_SCAN
from ...kernels.ssd.mamba2_scan import MAMBA2_SCAN
from ...kernels.ssd.types import SsdProblem
from ...surgery.checkpoint.checkpoint import Checkpoint, open_checkpoint
from ...surgery.checkpoint.dtypes import dtype_of
from ...surgery.checkpoint.loading import load_model
from ...surgery.checkpoint.sources import files_read
from ...surgery.checkpoint.tokenizer import encode_alike, load_tokenizer, open_tokenizer, other_ids, refuse_far_ids
from .harness import open_tasks, run_tasks
from .report import EvalData, EvalReport, EvalSuite, EvaluatedModel, SeenText, write_report
from .rows import compare
from .seen import seen_text
from .suites.suite import SUITES, EvalOptions, EvalText, Subject, SuiteResult, suite_module

HARNESS = "lm_eval"


class UnwrittenReportError(OutputError):
    """The report cannot be written; what was measured is its `report`."""

    def __init__(self, message: str, report: EvalReport) -> None:
        super().__init__(message)
        self.report = report


def evaluate(
    model: str | Path | Checkpoint,
    against: str | Path | Checkpoint | None = None,
    *,
    suites: Sequence[str] | None = None,
    data: str | Path | None = None,
    lengths: Sequence[int] = (512, 2048),
    tokens: int = 16384,
    trials: int = 4,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    lm_eval: Sequence[str] = (),
    lm_eval_limit: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
) -> EvalReport:
    """Measures a model, and another one on the same text and the same questions.

    One model is in memory at a time. Errors are bootstrapped over sequences or timings; those of differences
    draw the same sequences for both models.

    Args:
        model: a model folder, Hub id or open checkpoint, source or converted, of any layout.
        against: another one, for differences (model - against).
        suites: names from `suites.SUITES`; by default all of them, or none when only `lm_eval` is given.
        data: text, as for `measure`; by default the embedded one.
        lengths: tokens of a sequence, in every suite.
        tokens: of text at each length, for the losses.
        trials: sequences for each setting of a probe.
        seed: of the choice of text and of the questions.
        options: further fields of `suites.EvalOptions`: pairs, depths, chunk, repeats, decode_tokens.
        lm_eval: tasks of lm-evaluation-harness: names, or files of one's own.
        lm_eval_limit: questions of each task at most.
        device: where the models run.
        dtype: of the weights; by default as stored, and float32 on a CPU, which is slow at anything shorter.
        tokenizer: folder or Hub id, for both models; by default their own, which must encode alike.
        revision: of a Hub id, for `model`.
        token: Hub token.
        out: eval.json; pictures go beside it.
        force: replace it.

    Raises:
        UsageError: an unknown suite or option, or tokenizers that do not encode alike.
        UnwrittenReportError: the disk is full, or another process wrote the report meanwhile.
        EvaluationError: a figure is not finite; the harness is not installed or does not know a task.
    """
    names = _suite_names(suites, lm_eval)
    settings = _options(options, lengths=tuple(lengths), tokens=tokens, trials=trials, seed=seed)
    if out is not None:
        refuse_file_name(out, ".json", ".yaml", ".yml")
        out = named_path(out, "output")
        read = [file for one in (model, against, tokenizer) for file in _files_of(one)]
        outputs = [out, *(_picture(out, name) for name in names if _draw(name))]
        refuse_to_replace(outputs, *read, data, force=force)
    weights_dtype = _dtype(dtype, device)
    tasks = open_tasks(lm_eval, limit=lm_eval_limit) if lm_eval else None
    checkpoints = [
        open_checkpoint(model, revision=revision, token=token) if not isinstance(model, Checkpoint) else model
    ]
    if against is not None:
        checkpoints.append(against if isinstance(against, Checkpoint) else open_checkpoint(against, token=token))
    encoder, encoder_name = _tokenizer(checkpoints, tokenizer, token)
    strange = [] if tokenizer is None else [other_ids(checkpoint, encoder, encoder_name) for checkpoint in checkpoints]
    text = EvalText(
        data,
        encoder,
        longest=settings.longest,
        tokens=settings.tokens,
        seed=settings.seed,
        vocab_size=min(checkpoint.config.vocab_size for checkpoint in checkpoints),
    )
    results: list[dict[str, SuiteResult]] = []
    facts = []
    for checkpoint in checkpoints:
        loaded = load_model(checkpoint, dtype=weights_dtype, device=device)
        facts.append(_facts(checkpoint, loaded, seen_text(checkpoint.path, data) if names else None))
        subject = Subject(loaded, checkpoint.source_id)
        results.append(_run(subject, text, settings, names))
        if tasks is not None:
            results[-1][HARNESS] = run_tasks(
                loaded,
                encoder,
                tasks,
                length=settings.longest,
                limit=lm_eval_limit,
                batch_size=1 if subject.device.type == "cpu" else 8,
            )
        backends = _backends(loaded)
        del loaded, subject
    report = EvalReport(
        version=__version__,
        model=facts[0],
        against=facts[1] if len(facts) > 1 else None,
        data=EvalData(name=data_name(data), tokens=len(text.stream), tokenizer=encoder_name),
        device=describe_device(torch.device(device)),
        backends=backends,
        options={key: list(v) if isinstance(v, tuple) else v for key, v in asdict(settings).items()},
        suites=_compared(results, [fact.name for fact in facts], [note for note in strange if note]),
    )
    if out is None:
        return report
    try:
        for path in outputs:
            refuse_existing(path, force=force)  # another process may have been faster
        return _written(report, out)
    except PalimpsaError as error:
        raise UnwrittenReportError(str(error), report) from error


def _suite_names(suites: Sequence[str] | None, lm_eval: Sequence[str]) -> tuple[str, ...]:
    names = tuple(suites) if suites is not None else () if lm_eval else tuple(SUITES)
    for name in names:
        suite_module(name)
    if not names and not lm_eval:
        raise UsageError(f"no suite was asked for; give some of {', '.join(SUITES)}, or tasks for lm_eval")
    return tuple(dict.fromkeys(names))


def _options(more: Mapping[str, Any] | None, **given: Any) -> EvalOptions:
    known = EvalOptions.__dataclass_fields__
    for name in more or {}:
        if name not in known:
            raise UsageError(f"options: there is no {name}; expected some of {', '.join(known)}")
    return EvalOptions(**{**given, **(more or {})})


def _tokenizer(checkpoints: Sequence[Checkpoint], named: str | Path | None, token: str | None) -> tuple[Any, str]:
    """The tokenizer of all models, and its name.

    Raises:
        CheckpointError: it has ids that a model has no row for.
        UsageError: two models have tokenizers that do not encode alike, so their losses are not of the same targets.
    """
    rows = min(checkpoint.config.vocab_size for checkpoint in checkpoints)
    if named is not None:
        return load_tokenizer(named, token=token, rows=rows), data_name(named)
    # Where none has one, opening the first says what to do.
    owners = [checkpoint for checkpoint in checkpoints if checkpoint.tokenizer_files] or checkpoints[:1]
    encoders = [open_tokenizer(checkpoint) for checkpoint in owners]
    if not all(encode_alike(encoders[0], encoder) for encoder in encoders[1:]):
        raise UsageError(
            f"{owners[0].source_id} and {owners[1].source_id} have different tokenizers, so their losses are not of "
            f"the same tokens; compare models with one tokenizer, or name it with --tokenizer"
        )
    refuse_far_ids(encoders[0], rows, owners[0].source_id)
    return encoders[0], owners[0].source_id


def _dtype(name: str | None, device: str) -> torch.dtype | None:
    if name is None:
        return torch.float32 if torch.device(device).type == "cpu" else None
    return dtype_of(name)


def _facts(checkpoint: Checkpoint, model: Any, seen: SeenText | None) -> EvaluatedModel:
    return EvaluatedModel(
        name=checkpoint.source_id,
        fingerprint=checkpoint.fingerprint,
        layout=checkpoint.layout,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=dtype_name(model.config.dtype),
        palimpsa_layers=list(checkpoint.palimpsa_layers),
        seen=seen,
    )


def _backends(model: Any) -> dict[str, str]:
    """The kernels of each kind of layer on this device."""
    weight = model.get_input_embeddings().weight
    return {
        "metaplastic scan": METAPLASTIC_SCAN.resolve("auto", weight.device),
        "mamba2 scan": MAMBA2_SCAN.resolve("auto", weight.device, SsdProblem(weight.dtype)),
    }


def _run(subject: Subject, text: EvalText, options: EvalOptions, names: Sequence[str]) -> dict[str, SuiteResult]:
    found = {}
    with progress(len(names), f"evaluating {subject.name}") as bar:
        for name in names:
            found[name] = suite_module(name).run(subject, text, options)
            bar.update()
    return found


def _compared(
    results: Sequence[Mapping[str, SuiteResult]], names: Sequence[str], strange: Sequence[str]
) -> dict[str, EvalSuite]:
    found = {}
    for name, first in results[0].items():
        second = results[1][name] if len(results) > 1 else None
        notes = [*strange, *first.notes, *(second.notes if second else ())]
        rows = compare(name, first.measurements, second.measurements if second else None, names)
        found[name] = EvalSuite(rows=rows, notes=list(dict.fromkeys(notes)))
    return found


def _written(report: EvalReport, out: Path) -> EvalReport:
    """Draws the pictures, writes eval.json last, and returns the report with the pictures' names in it."""
    names = [report.model.name] if report.against is None else _different(report.model.name, report.against.name)
    suites = {}
    for name, suite in report.suites.items():
        draw = _draw(name)
        if draw is not None and suite.rows:
            picture = _picture(out, name)
            draw(suite.rows, names, picture)
            suite = suite.model_copy(update={"plot": picture.name})
        suites[name] = suite
    report = report.model_copy(update={"suites": suites})
    write_report(report, out)
    return report


def _draw(suite: str) -> Callable[..., None] | None:
    """What draws the picture of a suite, if it has one."""
    return getattr(suite_module(suite), "draw", None) if suite in SUITES else None


def _picture(out: Path, suite: str) -> Path:
    return out.with_name(f"{out.stem}-{suite}.png")


def _files_of(model: str | Path | Checkpoint | None) -> list[Path]:
    return files_read(model.path if isinstance(model, Checkpoint) else model)


def _different(first: str, second: str) -> list[str]:
    return [first, second] if first != second else [f"{first} (model)", f"{second} (against)"]
