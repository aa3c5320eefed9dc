"""Tasks of lm-evaluation-harness (the optional package lm-eval) on a model that is loaded already."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...base.console import counted
from ...base.errors import EvaluationError, UsageError
from ...base.statistics import estimate
from ...base.text import opening_ids
from .suites.suite import Measurement, SuiteResult

_SUFFIXES = (".yaml", ".yml")
_AGREEMENT = 1e-6
"""Relative: samples are kept when their mean is the figure that the harness itself gives."""


class Tasks(NamedTuple):
    """Tasks that the harness knows: how they were asked for, their names, and the harness's table of them."""

    asked: Sequence[str]
    names: list[str]
    manager: Any


def open_tasks(tasks: Sequence[str], *, limit: int | None = None) -> Tasks:
    """Finds the tasks, before anything is measured.

    Args:
        tasks: names that the harness knows, or `.yaml` files of tasks of one's own.
        limit: questions of each task at most.

    Raises:
        EvaluationError: lm-eval is not installed.
        UsageError: a task is unknown, a file does not exist, or the limit is no number of questions.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"--lm-eval-limit {limit}: expected 1 question or more; leave it out for all of them")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EvaluationError(
            f"--lm-eval needs the package lm-eval, which cannot be imported ({error}); install palimpsa-surgery[eval]"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names, folders = _named(tasks)
    # Reading the thousands of tasks that the harness ships takes longer than a small task itself.
    own = all(task.endswith(_SUFFIXES) for task in tasks)
    manager = TaskManager(include_path=folders or None, include_defaults=not own)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise UsageError(
            f"--lm-eval: the harness knows no task {', '.join(unknown)}; `lm_eval ls tasks` lists them, and a task of "
            f"your own is given as its .yaml file"
        )
    return Tasks(tasks, names, manager)


def run_tasks(
    model: Any, tokenizer: Any, tasks: Tasks, *, length: int, limit: int | None = None, batch_size: int = 1
) -> SuiteResult:
    """Every metric of every task.

    Differences of two models are paired over the questions wherever the metric is a mean over questions (accuracies)
    or a perplexity; for others the errors of the harness are combined.

    Args:
        model: a transformers causal LM.
        tokenizer: its tokenizer.
        tasks: what `open_tasks` found.
        length: tokens of a question that are read; a longer one loses its beginning, which a note says. Perplexities
            are over sequences of as many. The harness would take 2,048, as a Mamba2's config names no length.
        limit: questions of each task at most.
        batch_size: questions at a time.

    Raises:
        EvaluationError: the harness cannot load a task.
        UsageError: an answer of a task is longer than `length`.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    try:
        with _kept_off_stdout():
            harness_model = _counting(HFLM)(
                pretrained=model,
                tokenizer=tokenizer,
                backend="causal",
                batch_size=batch_size,
                max_length=length,
                add_bos_token=bool(opening_ids(tokenizer)),  # its own default is another from release to release
            )
            found = simple_evaluate(
                harness_model, tasks=tasks.names, limit=limit, task_manager=tasks.manager, bootstrap_iters=1000
            )
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EvaluationError(
            f"--lm-eval {','.join(tasks.asked)}: the harness stopped ({type(error).__name__}: {reason}); check the "
            f"task's file, and that its data can be reached"
        ) from error
    cut = harness_model.cut
    notes = [f"{counted(cut, 'input')} longer than {length:,} tokens lost the beginning; give more --lengths"]
    return SuiteResult(_measurements(found), notes if cut else [])


def _counting(base: type) -> type:
    """The harness's model class, which cuts long inputs and says so only in a log, with a count of them in `cut`."""

    class Counting(base):
        cut = 0

        def _loglikelihood_tokens(self, requests: Sequence[Any], *args: Any, **options: Any) -> Any:
            room = self.max_length + 1  # the last token is only predicted
            longest = max((len(continuation) for _, _, continuation in requests), default=0)
            if longest > self.max_length:
                raise UsageError(
                    f"lengths: an answer of the task has {counted(longest, 'token')}, and at most {self.max_length} "
                    "are read; give more --lengths"
                )
            self.cut += sum(len(context) + len(continuation) > room for _, context, continuation in requests)
            return super()._loglikelihood_tokens(requests, *args, **options)

        def tok_batch_encode(self, *args: Any, left_truncate_len: int | None = None, **options: Any) -> Any:
            ids, mask = super().tok_batch_encode(*args, **options)
            if left_truncate_len is None:
                return ids, mask
            self.cut += int((mask.sum(1) > left_truncate_len).sum())
            return ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]

    return Counting


@contextlib.contextmanager
def _kept_off_stdout() -> Iterator[None]:
    """What the harness prints goes to stderr, and its progress bars nowhere when that is no terminal."""
    with contextlib.ExitStack() as stack:
        if not sys.stderr.isatty():
            sink = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stderr(sink))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _named(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of the tasks, those in files included, and the folders of the files."""
    names, folders = [], []
    for task in tasks:
        path = Path(task)
        if not task.endswith(_SUFFIXES):
            names.append(task)
            continue
        if not path.is_file():
            raise UsageError(f"--lm-eval {task}: no such file; give a task's name, or a .yaml file that exists")
        # Not parsed as YAML: such files may hold tags that only the harness understands.
        named = re.search(r"^task:\s*['\"]?([\w.-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if named is None:
            raise UsageError(f"--lm-eval {task}: the file names no task; add a line such as task: my_task")
        names.append(named.group(1))
        folders.append(str(path.resolve().parent))
    return names, list(dict.fromkeys(folders))


def _measurements(found: Mapping[str, Any]) -> list[Measurement]:
    made = []
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            error = float(error) if isinstance(error, (int, float)) and math.isfinite(error) else None
            higher = found.get("higher_is_better", {}).get(task, {}).get(metric)
            better = None if higher is None else "higher" if higher else "lower"
            label = f"{task} {metric}" if filtered == "none" else f"{task} {metric} ({filtered})"
            questions = [s for s in found.get("samples", {}).get(task, ()) if s.get("filter", "none") == filtered]
            samples, exponential = _samples([question.get(metric) for question in questions], float(value))
            if samples is None:
                samples, own = np.array([[float(value), 1.0]]), error
            else:
                own = None
            made.append(Measurement(label, "", samples, {}, better, exponential=exponential, error=own))
    return made


def _samples(values: Sequence[Any], figure: float) -> tuple[np.ndarray | None, bool]:
    """Samples whose ratio (or its exponential, the second result) is the harness's own figure; None if none are."""
    forms: list[tuple[Callable[[Any], tuple[float, float]], bool]] = [
        (lambda value: (float(value), 1.0), False),  # a mean over questions
        (lambda value: (-float(value), 1.0), True),  # a perplexity of log-likelihoods
        (lambda value: (-float(value[0]), float(value[1])), True),  # the same by words or bytes
        (lambda value: (-float(value[0]) / math.log(2), float(value[1])), False),  # bits a byte
    ]
    for form, exponential in forms:
        try:
            samples = np.array([form(value) for value in values])
        except (TypeError, ValueError, IndexError):
            continue
        if len(samples) and math.isclose(
            estimate(samples, exponential=exponential).value, figure, rel_tol=_AGREEMENT, abs_tol=1e-12
        ):
            return samples, exponential
    return None, False
