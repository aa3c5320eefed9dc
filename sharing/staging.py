"""What a push uploads, put together in a folder on this machine first: a model or an adapter, its code, its card.

Only files that belong to a model go along, and their text says nothing of this machine: paths are cut to their last
part, and a token, or a path that is left, stops the push.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from ..base.console import counted
from ..base.errors import ChangedFileError, CheckpointError, SchemaError, UsageError
from ..base.files import RECIPE, load_json, load_yaml, named_path, write_json, write_text
from ..base.schemas import read_model, write_model
from ..kernels.common.precision import dtype_name
from ..recipes.evaluation.report import read_report
from ..recipes.training.adapter_files import (
    CONFIG,
    SOURCE,
    TENSORS,
    AdapterSource,
    adapter_recipe,
    read_adapter_config,
    read_adapter_tensors,
)
from ..recipes.training.recipe import Recipe
from ..surgery.checkpoint.checkpoint import Checkpoint, file_stamp, open_checkpoint
from ..surgery.checkpoint.licenses import card_metadata, license_files
from ..surgery.checkpoint.sources import (
    TOKENIZER_PATTERNS,
    is_of_tokenizer,
    read_foreign_json,
    reading,
    recipe_files,
    tokenizer_file_name,
    tokenizer_files,
    weight_files,
)
from ..surgery.checkpoint.tokenizer import refuse_code
from ..surgery.conversion.card import CardFacts, checkpoint_facts, kept_readme, render_card
from ..surgery.conversion.model_folder import copy_without_paths
from ..surgery.conversion.report import ConversionReport
from ..surgery.conversion.writer import INDEX_FILE
from ..surgery.measure.profile import read_profile
from ..surgery.planning.plan import read_plan
from .adapter_base import check_base
from .adapter_card import render_adapter_card
from .evaluation_card import EVAL_FILE, CardEvaluation, card_evaluation

MODEL, ADAPTER = "model", "adapter"
_BESIDE = {
    MODEL: (
        "generation_config.json",
        *TOKENIZER_PATTERNS,
        "plan.yaml",
        "profile.json",
        "profile.png",
        "surgery_report.json",
        RECIPE,
        "recipe-*.yaml",
    ),
    ADAPTER: (CONFIG, SOURCE, RECIPE),
}
_OWN_FILES = ("plan.yaml", "profile.json", "surgery_report.json", RECIPE, CONFIG, SOURCE)
CARD = "README.md"
SECRET = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b")
_PATH = re.compile(r"(?:/|~/|\.{1,2}/|\\\\|[A-Za-z]:[\\/]).+")
_TEXT_FILE = re.compile(r"[\w. /\\:~-]+\.(?:jsonl|json|txt|yaml|yml)(?:\.gz)?")
_LARGEST_TEXT = 2**22


@dataclass(frozen=True)
class Upload:
    """The files of a push.

    Attributes:
        kind: `model` or `adapter`.
        files: name in the repository -> file on this machine. Weights are where they were.
        own_card: whether README.md was written by this package, not by the user.
        identity: what tells another version of this model from another model.
        notes: what was left out, and why.
        stamps: of the files that were there when the push began.
    """

    kind: str
    files: dict[str, Path]
    own_card: bool
    identity: dict[str, Any]
    notes: tuple[str, ...]
    stamps: dict[Path, tuple[int, int, int]]

    def refuse_changed(self) -> None:
        """Raises `CheckpointError` where a file was written to or replaced since the push began.

        Card, code and the smaller files would be one model's and the weights, which are not copied, another's.
        """
        for path, stamp in self.stamps.items():
            with reading(path.parent.name):
                now = file_stamp(path)
            if now != stamp:
                raise ChangedFileError(
                    f"{path.parent.name}: its {path.name} was written to or replaced during the push; leave the folder "
                    "alone meanwhile, and push again"
                )


def prepare_upload(
    folder: str | Path,
    staging: Path,
    name: str,
    *,
    evaluation: str | Path | None = None,
    base: str | None = None,
    token: str | None = None,
) -> Upload:
    """Puts together what a push of `folder` uploads; all but the weights is written to `staging`.

    Args:
        folder: a model folder (of convert, finetune or merge) or an adapter folder.
        staging: an empty folder for what is written.
        name: the Hub id, for the card.
        evaluation: eval.json of the model; by default the one in the folder, if any.
        base: Hub id of an adapter's base, when the adapter was trained on a folder; compared as far as it can be.
        token: Hub token, for a private base.

    Raises:
        UsageError: neither a model nor an adapter, or an option that does not go with it.
        CheckpointError: the model cannot be opened; a file holds a token or a path of this machine.
        SchemaError: an evaluation of another model.
    """
    folder = named_path(folder, "model folder")
    kind = _kind(folder)
    if kind == MODEL and base is not None:
        raise UsageError("--base: is for adapters; a model's base is in its card")
    report = named_path(evaluation, "evaluation") if evaluation is not None else folder / EVAL_FILE
    if evaluation is not None and not report.is_file():
        raise UsageError(f"--eval {report}: no such file; write it with palimpsa evaluate")
    with reading(folder.name):
        stamps = {path: file_stamp(path) for path in (*_files(folder), *tokenizer_files(folder))}
    own = kept_readme(folder)
    names = sorted({path.name for path in _files(folder)} | {*map(tokenizer_file_name, tokenizer_files(folder))})
    weights = _weights(folder, kind)
    patterns = (*_BESIDE[kind], *(path.name for path in license_files(folder)))
    beside = [name for name in names if name not in weights and any(fnmatch(name, p) for p in patterns)]
    for file in beside:
        _copy_clean(folder / file, staging / file)
    figures = _copy_evaluation(report, staging) if report.is_file() else None
    make = _model_card if kind == MODEL else _adapter_card
    card, identity, code = make(folder, staging, name, figures, base)
    write_text(staging / CARD, own or card)
    _refuse_private(staging, folder, code)
    files = {path.relative_to(staging).as_posix(): path for path in _files(staging, "**/*")}
    files |= {file: folder / file for file in weights}
    left = [n for n in names if n not in files and not n.startswith(".")]
    notes = (f"not part of a model, so not uploaded: {', '.join(left)}",) if left else ()
    if base is not None:
        notes = (*notes, check_base(folder, base, token))
    return Upload(kind, dict(sorted(files.items())), own is None, identity, notes, stamps)


def _files(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.is_file())


def _kind(folder: Path) -> str:
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; push takes a model folder or an adapter folder")
    if (folder / CONFIG).is_file():
        return ADAPTER
    if (folder / "config.json").is_file():
        return MODEL
    inside = " or ".join(str(folder / name) for name in ("final", "adapter") if (folder / name).is_dir())
    hint = f"give {inside}" if inside else f"give a folder with config.json or {CONFIG}"
    raise UsageError(f"{folder}: is neither a model nor an adapter; {hint}")


def _weights(folder: Path, kind: str) -> list[str]:
    """The names of the weight files and of their index."""
    if kind == ADAPTER:
        if not (folder / TENSORS).is_file():
            raise CheckpointError(f"{folder}: has no {TENSORS}; a push needs the adapter's tensors")
        return [TENSORS]
    names = [path.name for path in weight_files(folder)]
    indexed = (folder / INDEX_FILE).is_file() and "model.safetensors" not in names
    expected = r"model-[\w.-]+\.safetensors" if indexed else r"model\.safetensors"
    odd = [name for name in names if not re.fullmatch(expected, name)]
    if odd:
        raise CheckpointError(
            f"{folder}: its weights are in {odd[0]}, expected model.safetensors or numbered shards, which transformers "
            "finds by itself; write the model with this package"
        )
    return [*names, INDEX_FILE] if indexed else names


def _model_card(
    folder: Path, staging: Path, name: str, figures: CardEvaluation | None, base: str | None
) -> tuple[str, dict[str, Any], frozenset[str]]:
    """The card of a model, what identifies it, and the names of the code files, which are written too."""
    from ..modeling.bundle import bundle_remote_code, remote_code_keys

    checkpoint = open_checkpoint(folder)
    if not checkpoint.converted:
        raise UsageError(
            f"{folder}: is in the layout {checkpoint.layout}; push takes a folder that convert, finetune or merge wrote"
        )
    refuse_code(folder, str(folder), None)
    checkpoint.check_all()
    if figures is not None and not checkpoint.matches(figures.fingerprint):
        raise SchemaError(
            f"{EVAL_FILE}:model.fingerprint: the evaluation is of another model ({figures.fingerprint[:12]}, not "
            f"{checkpoint.fingerprint[:12]}); evaluate this one, or leave the file out"
        )
    _copy_config(folder / "config.json", staging / "config.json", remote_code_keys(checkpoint.layout))
    code = frozenset(bundle_remote_code(staging, checkpoint.layout))
    report, said = _read_report(folder), read_foreign_json(folder / "config.json")
    identity = {
        **{key: said.get(key) for key in ("model_type", "palimpsa_layers", "num_hidden_layers", "hidden_size")},
        "source_fingerprint": report.source_fingerprint if report else None,
    }
    return render_card(_facts(folder, checkpoint, report, name, figures)), identity, code


def _facts(
    folder: Path, checkpoint: Checkpoint, report: ConversionReport | None, name: str, figures: CardEvaluation | None
) -> CardFacts:
    profile, plan = folder / "profile.json", folder / "plan.yaml"
    facts = CardFacts(
        name=name,
        plan=read_plan(plan) if plan.is_file() else None,
        swapped=checkpoint.palimpsa_layers,
        dtype=dtype_name(checkpoint.dtype),
        **checkpoint_facts(checkpoint),
        profile=read_profile(profile) if profile.is_file() else None,
        verification=report.verification_lines() if report else {},
        training=tuple(fact for recipe in recipe_files(folder) for fact in training_facts(recipe)),
        evaluation=figures.section() if figures else "",
        results=figures.results() if figures else (),
        picture=(folder / "profile.png").is_file(),
    )
    return facts if facts.base_model != name else replace(facts, base_model=None)


def _adapter_card(
    folder: Path, staging: Path, name: str, figures: CardEvaluation | None, base: str | None
) -> tuple[str, dict[str, Any], frozenset[str]]:
    """The card of an adapter and what identifies it; with `base`, its files name that base."""
    source = read_model(AdapterSource, folder / SOURCE) if (folder / SOURCE).is_file() else None
    config = _cleaned(read_adapter_config(folder))
    read_adapter_tensors(folder)  # for what it refuses
    if base is not None:
        config["base_model_name_or_path"] = base
        write_json(staging / CONFIG, config)
        if source is not None:
            source = source.model_copy(update={"base": base})
            write_model(source, staging / SOURCE)
    named = config.get("base_model_name_or_path") or (_cleaned(source.base) if source else None)
    if not isinstance(named, str) or "/" not in named:
        raise UsageError(
            f"{folder}: the adapter belongs to a model folder named {named!r}, which nobody else has; push that model "
            "first and name it with --base owner/name"
        )
    recipe = adapter_recipe(folder)
    training = () if recipe is None else training_facts(recipe)
    swapped, fingerprint = (source.palimpsa_layers, source.fingerprint) if source else ((), None)
    card = render_adapter_card(name, named, swapped, config, card_metadata(folder), training, figures)
    return card, {"base_fingerprint": fingerprint, "peft_type": config.get("peft_type")}, frozenset()


def _read_report(folder: Path) -> ConversionReport | None:
    path = folder / "surgery_report.json"
    return read_model(ConversionReport, path) if path.is_file() else None


def training_facts(recipe: Path) -> tuple[str, ...]:
    """What a card says of the fine-tuning, from the recipe beside the weights; () without one."""
    if not recipe.is_file():
        return ()
    said = read_model(Recipe, recipe)
    amount = counted(said.steps, "step") if said.steps else counted(said.tokens, "token")
    before = "" if recipe.name == RECIPE else f"what it was made from (`{recipe.name}`): "
    what = f"mode `{said.mode}`, {amount}, {counted(said.batch_size, 'sequence')} of {said.data.seq_len} a step"
    text = f"text: `{_cleaned(said.data.train)}`" if said.data.train else ""
    if before:
        return (f"{before}{what}{', ' if text else ''}{text}",)
    facts = [what, *([text] if text else [])]
    facts.append(f"`{RECIPE}` has every setting")
    return tuple(facts)


def _copy_evaluation(report: Path, staging: Path) -> CardEvaluation:
    """eval.json and its pictures; a picture that is gone is left out of the card."""
    found = read_report(report)
    figures = card_evaluation(found)
    write_json(staging / EVAL_FILE, _cleaned(found.model_dump(mode="json")))
    pictures = {suite: name for suite, name in figures.pictures.items() if (report.parent / name).is_file()}
    for name in pictures.values():
        shutil.copyfile(report.parent / name, staging / name)
    return replace(figures, pictures=pictures)


def _copy_clean(source: Path, target: Path) -> None:
    """Copies a file without the paths in its settings. Files of other programs lose such an entry of their first level
    only, as their deeper text may be tokens; a file without a path is copied byte for byte."""
    if source.name not in _OWN_FILES and not source.match("recipe-*.yaml"):
        copy_without_paths(source, target)
        return
    content = load_json(source) if source.suffix == ".json" else load_yaml(source)
    clean = _cleaned(content)
    if clean == content:
        shutil.copyfile(source, target)
    elif source.suffix == ".json":
        write_json(target, clean)
    else:
        write_text(target, yaml.safe_dump(clean, sort_keys=False))


def _copy_config(source: Path, target: Path, wanted: dict[str, Any]) -> None:
    """Copies config.json with what remote code needs. Other programs may have written an infinity into it, bare or as
    a table, so it is not held to strict JSON and what is there is kept as it is."""
    content = json.loads(source.read_text(encoding="utf-8-sig"))
    clean = {key: value for key, value in content.items() if not (isinstance(value, str) and _PATH.fullmatch(value))}
    clean |= wanted
    if clean == content:
        shutil.copyfile(source, target)
    else:
        write_text(target, json.dumps(clean, indent=2, ensure_ascii=False) + "\n")


def _cleaned(value: Any) -> Any:
    """The value with every path in it cut to its last part; `owner/name` of a data set is no path."""
    if isinstance(value, dict):
        return {key: _cleaned(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cleaned(inner) for inner in value]
    if isinstance(value, str) and len(value) > 2 and (_PATH.fullmatch(value) or _TEXT_FILE.fullmatch(value)):
        return PurePosixPath(value.replace("\\", "/")).name
    return value


def _refuse_private(staging: Path, folder: Path, code: frozenset[str]) -> None:
    """Raises `CheckpointError` for a text with a token, the home's path or the model folder's in it.

    A vocabulary may hold any text as a token, so only tokens of the Hub are looked for in it.
    """
    places = [path for path in (folder.resolve(), Path.home()) if len(path.parts) > 1]
    pattern = re.compile(rf"(?<![\w./:-])(?:{'|'.join(re.escape(str(place)) for place in places)})(?![\w-])")
    for path in _files(staging, "**/*"):
        if path.suffix in (".png", ".model") or path.name in code or path.stat().st_size > _LARGEST_TEXT:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if SECRET.search(text):
            raise CheckpointError(
                f"{path.name}: holds what looks like a Hub token; remove it from the file and revoke it on the Hub"
            )
        found = None if is_of_tokenizer(tokenizer_file_name(path)) else pattern.search(text)
        if found:
            raise CheckpointError(
                f"{path.name}: holds a path of this machine ({found.group()}); remove it before a push"
            )
