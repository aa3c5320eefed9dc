"""Fine-tuning from a model folder and a recipe to a run folder: everything around the loop."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...base.console import counted, human_count, human_seconds, setup_logging
from ...base.errors import TrainingError, UsageError
from ...base.files import named_path
from ...kernels.backends import require_kernels, set_require_kernels
from ...kernels.common.precision import DTYPES
from ...kernels.metaplastic.scan import METAPLASTIC_SCAN
from ...surgery.checkpoint.checkpoint import Checkpoint, open_checkpoint
from ...surgery.checkpoint.loading import load_model
from ...surgery.checkpoint.tokenizer import open_tokenizer, with_tokenizer
from ...surgery.conversion.model_folder import output_specs
from ..data.documents import open_text, text_key
from ..data.packing import IGNORED, TokenSequence, TokenStream, sequences_key, shared_documents, split_documents
from ..launch import launched_processes
from .adapters import save_run
from .checkpointing import Position, latest_checkpoint, load_checkpoint, model_key, read_position, trained_parameters
from .loop import check_batch, check_targets, save, summed, train
from .losses import CausalLoss, resolve_loss
from .metrics import Training, read_metrics, write_metrics_file
from .modes import check_packing, prepare_mode
from .optim import make_optimizer
from .recipe import ADAPTER_MODES, Recipe, find_recipe, load_recipe, without_effect
from .run_folder import check_room, check_run_folder, clear_run_folder, held
from .saving import gather, save_model
from .validation import evaluate_loss

logger = logging.getLogger(__name__)

TOKENIZER_KEY = "data.tokenizer"
"""The recipe key that names a tokenizer, for messages."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run is.

    Attributes:
        folder: the run folder.
        final: the saved model folder.
        steps: optimizer steps done, those before a resume included.
        tokens: tokens read.
        loss: of the last step.
        validation: (step, loss, standard error) of each validation.
        seconds: of this call.
    """

    folder: Path
    final: Path
    steps: int
    tokens: int
    loss: float | None
    validation: tuple[tuple[int, float, float], ...]
    seconds: float


def finetune(
    model_folder: str | Path,
    recipe: str | Path | dict[str, Any] | Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    overrides: Sequence[str] = (),
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> RunResult:
    """Fine-tunes a model and writes `out`: `recipe.yaml`, `metrics.jsonl`, `checkpoints/step-N`, `final/`.

    A lora or qlora run also writes `adapter/`; its `final/` has the adapter merged.

    Args:
        model_folder: a converted model, or a source of surgery in any layout; a folder or a Hub id.
        recipe: name of a shipped recipe, file, mapping or `Recipe`.
        out: run folder.
        resume: go on with the run in `out` from its newest complete checkpoint, or from the start where it was stopped
            before the first; with its own recipe, but for `run_folder.MAY_CHANGE`.
        overrides: `key=value` changes of the recipe.
        force: replace what is in `out`.
        revision: of a Hub id.
        token: Hub token.

    Raises:
        UsageError: a recipe that makes no sense, or with this model.
        OutputExistsError: `out` holds a run, and neither `resume` nor `force` was given.
        TrainingError: training had to stop; checkpoints written before are whole.
    """
    file = find_recipe(recipe) if isinstance(recipe, (str, Path)) else None
    recipe, out = load_recipe(recipe, overrides), named_path(out, "run folder")
    with process_settings(recipe):
        return _finetune(
            model_folder,
            recipe,
            out,
            file=file,
            overrides=overrides,
            resume=resume,
            force=force,
            revision=revision,
            token=token,
        )


def _finetune(
    model_folder: str | Path,
    recipe: Recipe,
    out: Path,
    *,
    file: Path | None,
    overrides: Sequence[str],
    resume: bool,
    force: bool,
    revision: str | None,
    token: str | None,
) -> RunResult:
    started = time.perf_counter()
    accelerator = make_accelerator(recipe, out)
    main = accelerator.is_main_process
    check_batch(recipe, accelerator.num_processes)
    if recipe.warmup_steps() >= recipe.total_steps():
        warm, steps = recipe.warmup_steps(), counted(recipe.total_steps(), "step")
        logger.warning("warmup: takes %d of %s, so the learning rate never stays at its full height", warm, steps)
    checkpoint = open_checkpoint(model_folder, revision=revision, token=token)
    checkpoint = with_tokenizer(checkpoint, recipe.data.tokenizer, token=token, option=TOKENIZER_KEY)
    for unused in without_effect(recipe, overrides, swapped=bool(checkpoint.palimpsa_layers)):
        logger.warning("%s has no effect in this run; leave it out, or change the other", unused)
    with contextlib.ExitStack() as stack:
        with accelerator.main_process_first():
            if main:
                check_run_folder(out, recipe, resume=resume, force=force, model=checkpoint.path, recipe_file=file)
                stack.enter_context(held(out))
        # All that can be refused has been by the end of this: only then the run that was there is removed.
        run = assemble(accelerator, checkpoint, recipe, out)
        found = latest_checkpoint(out / "checkpoints") if resume else None
        if found is not None:
            run.position = replace(run.position, data=_data_key(run, checkpoint, read_position(found).data))
            run.position = load_checkpoint(found, run.module, run.optimizer, run.position, checkpoint.matches)
            logger.info("going on from %s", found.name)
            run.history = read_metrics(out / "metrics.jsonl", until=run.position.step)
        check_targets(run)
        accelerator.wait_for_everyone()
        if main:
            trained = sum(parameter.numel() for parameter in trained_parameters(run.module).values())
            specs = output_specs(checkpoint, checkpoint.config, DTYPES.get(recipe.save_dtype))
            size = sum(spec.nbytes for spec in specs)
            check_room(out, recipe, trained, size, resume=resume)
            clear_run_folder(out, recipe, resume=resume)
            write_metrics_file(out / "metrics.jsonl", run.history)
        if recipe.trackers:
            accelerator.init_trackers("trackers")
        train(run)
        save_final(run, checkpoint)
        accelerator.end_training()
        accelerator.free_memory()
    return _result(run, time.perf_counter() - started)


def _data_key(run: Training, checkpoint: Checkpoint, before: str) -> str:
    """The key of the training text: as an earlier release made it, of the files' names too, where it made `before`."""
    data = run.recipe.data
    if before == run.position.data:
        return before
    named = text_key(
        data.train,
        open_tokenizer(checkpoint, option=TOKENIZER_KEY),
        chat=data.chat,
        max_tokens=data.max_tokens,
        special_tokens=data.special_tokens,
        names=True,
    )
    return named if named == before else run.position.data


@contextlib.contextmanager
def process_settings(recipe: Recipe) -> Iterator[None]:
    """Kernels that must run, determinism and the seed of new adapters, as the recipe says; the first two are undone."""
    kernels, deterministic = require_kernels(), torch.are_deterministic_algorithms_enabled()
    set_require_kernels(recipe.require_kernels or kernels)
    torch.manual_seed(recipe.seed)
    try:
        if recipe.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        set_require_kernels(kernels)
        torch.use_deterministic_algorithms(deterministic)


def make_accelerator(recipe: Recipe, out: Path) -> Any:
    """Accelerate's entry to devices and processes; precision stays with the model (see `CausalLoss`).

    Raises:
        UsageError: accelerate or a tracker is not installed, or the environment is half of a launcher's.
    """
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise UsageError(
            "fine-tuning needs the package accelerate, which is not installed; install palimpsa-surgery[train]"
        ) from error
    _check_trackers(recipe.trackers)
    # Without CUDA several processes must be told that they run on CPUs, or each believes to be alone.
    cpu = launched_processes() > 1 and not torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=cpu, mixed_precision="no", log_with=list(recipe.trackers) or None, project_dir=str(out)
    )
    if not accelerator.is_main_process:
        setup_logging(-1)  # one process speaks for all; an error still ends any of them with its message
    return accelerator


def _check_trackers(names: Sequence[str]) -> None:
    """Accelerate would leave out one whose package is missing, without a word."""
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import LoggerType

    known, installed = ([kind.value for kind in kinds] for kinds in (LoggerType, get_available_trackers()))
    for name in names:
        if name not in known:
            raise UsageError(f"trackers: there is no {name}; expected some of {', '.join(known)}")
        if name not in ("all", *installed):
            raise UsageError(f"trackers: the package of {name} is not installed; install it, or leave {name} out")


def assemble(accelerator: Any, checkpoint: Checkpoint, recipe: Recipe, out: Path) -> Training:
    """Model, text, optimizer and validation of a run, prepared for the processes that share it."""
    resolve_loss(recipe.loss, accelerator.device)
    if require_kernels():
        METAPLASTIC_SCAN.resolve("auto", accelerator.device)
    tokenizer = open_tokenizer(checkpoint, option=TOKENIZER_KEY)
    model = load_model(checkpoint)
    check_packing(model, recipe)
    model = prepare_mode(model, checkpoint, recipe)
    stream, validation = open_streams(accelerator, recipe, tokenizer, model.config.vocab_size)
    loss = CausalLoss(model, recipe.loss, recipe.precision)
    optimizer = make_optimizer(loss, recipe)
    key = model_key(loss, list(checkpoint.palimpsa_layers))
    if recipe.mode in ADAPTER_MODES:
        _ = checkpoint.file_digests  # kept for the end, when the files may be others
    module, optimizer = accelerator.prepare(loss, optimizer)
    run = Training(
        accelerator=accelerator,
        module=module,
        optimizer=optimizer,
        stream=stream,
        recipe=recipe,
        folder=out,
        position=Position(0, 0, key, checkpoint.fingerprint, stream.store.key, recipe.seed, sequences_key(validation)),
    )
    if validation:
        run.validate = lambda: evaluate_loss(
            run.module, validation, batch_size=recipe.micro_batch_size, accelerator=accelerator
        )
    return run


def save_final(run: Training, checkpoint: Checkpoint) -> None:
    """Writes `final/`, a normal model folder; of a lora or qlora run also `adapter/`.

    Raises:
        TrainingError: that could not be written; a checkpoint was, from which the run goes on.
    """
    main = run.accelerator.is_main_process
    trained = gather(run.module, keep=main)
    fault: Exception | None = None
    try:
        if main and run.recipe.mode in ADAPTER_MODES:
            save_run(run.accelerator.unwrap_model(run.module), trained, checkpoint, run.folder, run.recipe)
        elif main:
            save_model(trained, checkpoint, run.folder / "final", run.recipe)
    except Exception as error:  # whatever it is, the training is not lost with it
        fault = error
    if summed(run.accelerator, float(fault is not None)):
        save(run)
        raise TrainingError(
            f"final: could not be written ({fault or 'see the first process'}); what was trained is whole in "
            f"checkpoints/step-{run.position.step}: mend that and run again with --resume"
        ) from fault


def open_streams(
    accelerator: Any, recipe: Recipe, tokenizer: Any, vocab_size: int
) -> tuple[TokenStream, list[TokenSequence]]:
    """The training stream and the validation sequences; the first process on a machine tokenizes, the others wait.

    Raises:
        UsageError: the recipe names no text, or the tokenizer is another model's.
    """
    data = recipe.data
    if data.train is None:
        raise UsageError(
            "data.train: is missing; give a file, a folder or the id of a dataset, such as data.train=text.jsonl"
        )
    options = {"chat": data.chat, "special_tokens": data.special_tokens, "cache": data.cache}
    with accelerator.local_main_process_first():
        store = open_text(data.train, tokenizer, max_tokens=data.max_tokens, **options)
        held_out = open_text(data.val, tokenizer, **options) if data.val is not None else None
    for one in (store, held_out):
        if one is not None and int(one.tokens.max()) >= vocab_size:
            raise UsageError(
                f"data: the tokenizer gives the id {int(one.tokens.max())}, but the embedding has {vocab_size} rows;"
                " use the model's own tokenizer"
            )
    reset = data.packing == "documents"
    if held_out is not None:
        shared = shared_documents(store, held_out)
        if shared:
            logger.warning("%d of the %d documents of data.val are in data.train too", shared, held_out.documents)
        training = TokenStream(store, seed=recipe.seed, reset=reset)
        return training, _validation_sequences(TokenStream(held_out, reset=reset), recipe)
    kept, out = split_documents(store, data.val_fraction)
    training = TokenStream(store, kept, seed=recipe.seed, reset=reset)
    if not len(out):
        return training, []
    return training, _validation_sequences(TokenStream(store, out, reset=reset), recipe)


def _validation_sequences(stream: TokenStream, recipe: Recipe) -> list[TokenSequence]:
    """The sequences of the held-out text; none, and a warning, if nothing is to be predicted in them."""
    sequences = stream.sequences(recipe.eval_windows, recipe.data.seq_len)
    if sequences and not any((sequence.targets != IGNORED).any() for sequence in sequences):
        logger.warning(
            "no validation: nothing is to be predicted in %s of the held-out text; raise data.seq_len or eval_windows, "
            "or give another data.val",
            counted(len(sequences), "sequence"),
        )
        return []
    return sequences


def _result(run: Training, seconds: float) -> RunResult:
    losses = [line["loss"] for line in run.history if line["kind"] == "train"]
    validation = [(line["step"], line["loss"], line["stderr"]) for line in run.history if line["kind"] == "validation"]
    result = RunResult(
        folder=run.folder,
        final=run.folder / "final",
        steps=run.position.step,
        tokens=run.position.tokens,
        loss=losses[-1] if losses else None,
        validation=tuple(validation),
        seconds=seconds,
    )
    logger.info(
        "%s, %s tokens in %s%s",
        counted(result.steps, "step"),
        human_count(result.tokens),
        human_seconds(seconds),
        f"; validation loss {validation[0][1]:.4f} -> {validation[-1][1]:.4f}" if len(validation) > 1 else "",
    )
    return result
