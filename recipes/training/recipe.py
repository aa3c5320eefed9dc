"""The recipe: everything a fine-tuning run is asked to do, in one YAML file that a person reads and edits.

Read by name or file, with changes from the command line.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from ...base.errors import UsageError
from ...base.files import load_yaml, named_path
from ...base.schemas import StrictModel, StrictPart, dump_yaml, validate_model

MODES = ("full", "new", "new+swapped", "lora", "qlora")
ADAPTER_MODES = ("lora", "qlora")
CONFIGS = Path(__file__).parent.parent / "configs"
CHUNK_BYTES = 64 << 20
"""Logits in fp32 that a chunk of the loss may take; forward and backward hold about three such buffers. It stands here,
as an estimate needs it and no model class."""


class Stage(StrictPart):
    """One stage of a length curriculum: sequences of `seq_len` tokens until this fraction of the steps is done."""

    until: float = Field(gt=0, le=1)
    seq_len: int = Field(ge=2)


class DataRecipe(StrictPart):
    """Where the text comes from and how it becomes sequences of tokens."""

    train: str | list[str] | None = None
    val: str | list[str] | None = None
    val_fraction: float = Field(0.02, ge=0, lt=1)
    chat: bool = False
    special_tokens: Literal["parse", "text"] = "parse"
    tokenizer: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    seq_len: int = Field(2048, ge=2)
    curriculum: list[Stage] = Field(default_factory=list)
    packing: Literal["documents", "stream"] = "documents"
    cache: str | None = None

    @field_validator("max_tokens", mode="before")
    @classmethod
    def _counts_with_exponent(cls, value: Any) -> Any:
        return _count(value)

    @model_validator(mode="after")
    def _stages_in_order(self) -> DataRecipe:
        untils = [stage.until for stage in self.curriculum]
        if untils != sorted(set(untils)):
            raise ValueError("curriculum: `until` must grow from stage to stage")
        return self

    def seq_len_at(self, step: int, steps: int) -> int:
        """The sequence length of optimizer step `step` (0-based) of `steps`: the curriculum's stage, then `seq_len`."""
        for stage in self.curriculum:
            if step < stage.until * steps:
                return stage.seq_len
        return self.seq_len


class LoraRecipe(StrictPart):
    """Low-rank adapters; the new parameters are trained beside them and stored with them."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: list[str] = Field(default_factory=lambda: ["in_proj", "out_proj"], min_length=1)
    force: bool = False


class Recipe(StrictModel):
    """A whole recipe. Times are counted in optimizer steps, lengths in tokens, sizes in sequences."""

    description: str = ""
    mode: Literal["full", "new", "new+swapped", "lora", "qlora"] = "full"
    seed: int = Field(0, ge=0, lt=2**32)  # those of the steps, made from it, fill 64 bits
    data: DataRecipe = Field(default_factory=DataRecipe)

    batch_size: int = Field(8, ge=1)
    micro_batch_size: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    tokens: int | None = Field(None, ge=1)

    lr: float = Field(1e-5, ge=0)
    lr_new: float = Field(1e-3, ge=0)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: int | float = Field(0.05, ge=0)
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = Field(1.0, gt=0)

    precision: Literal["no", "bf16"] = "no"
    gradient_checkpointing: bool = False
    loss: Literal["auto", "chunked", "liger"] = "auto"
    require_kernels: bool = False
    deterministic: bool = False
    lora: LoraRecipe = Field(default_factory=LoraRecipe)

    log_every: int = Field(1, ge=1)
    importance_every: int = Field(10, ge=0)
    eval_every: int = Field(0, ge=0)
    eval_windows: int = Field(16, ge=1)
    save_every: int = Field(0, ge=0)
    keep: int = Field(2, ge=1)
    save_dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"
    trackers: list[str] = Field(default_factory=list)

    @field_validator("precision", mode="before")
    @classmethod
    def _refuse_fp16(cls, value: Any) -> Any:
        if value is False:  # YAML reads a bare `no` as false
            return "no"
        if value in ("fp16", "float16", "half"):
            raise ValueError("fp16 overflows in the recurrent states and their gradients; take bf16, or no for fp32")
        return value

    @field_validator("steps", "tokens", mode="before")
    @classmethod
    def _counts_with_exponent(cls, value: Any) -> Any:
        return _count(value)

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both numbers must lie in [0, 1)")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        problems = []
        if (self.steps is None) == (self.tokens is None):
            problems.append("give exactly one of `steps` and `tokens`")
        if self.batch_size % self.micro_batch_size:
            problems.append(
                f"batch_size ({self.batch_size}) must be a multiple of micro_batch_size ({self.micro_batch_size})"
            )
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            problems.append(f"warmup ({self.warmup}) is a fraction of the steps below 1, or a whole number of steps")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def total_steps(self) -> int:
        """Optimizer steps of the whole run: `steps`, or as many as it takes to read `tokens`."""
        if self.steps is not None:
            return self.steps
        average = 0.0
        done = 0.0
        for stage in self.data.curriculum:
            average += (stage.until - done) * stage.seq_len
            done = stage.until
        average += (1 - done) * self.data.seq_len
        return max(1, round(self.tokens / (average * self.batch_size)))

    def warmup_steps(self) -> int:
        """Steps over which the learning rate grows from zero; a number below 1 is a fraction of the run."""
        if self.warmup >= 1:
            return int(self.warmup)
        return round(self.warmup * self.total_steps())


def _count(value: Any) -> Any:
    """YAML 1.1 reads 1e9 as text, because it has no dot; a person means the number."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package."""
    return {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}


def find_recipe(name_or_file: str | Path) -> Path:
    """The file of a recipe: a path, or the name of a shipped one; `UsageError` lists the shipped ones."""
    path = named_path(name_or_file, "recipe")
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if str(name_or_file) in shipped:
        return shipped[str(name_or_file)]
    near = difflib.get_close_matches(str(name_or_file), shipped, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"shipped are {', '.join(shipped)}"
    raise UsageError(f"recipe {str(name_or_file)!r}: is neither a file nor a shipped recipe; {hint}")


def load_recipe(recipe: str | Path | dict[str, Any] | Recipe, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies `key=value` overrides (`data.seq_len=512`; values are read as YAML).

    Args:
        recipe: name of a shipped recipe, a YAML file, a mapping, or a recipe.
        overrides: changes, later ones win.

    Raises:
        UsageError: every problem of file and overrides at once, each with its key, the nearest valid one for a
            misspelled key.
    """
    if isinstance(recipe, (Recipe, dict)):
        values = recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else dict(recipe)
        values.setdefault("schema_version", 1)
        where = "recipe"
    else:
        path = find_recipe(recipe)
        values, where = load_yaml(path), path.name
    problems = []
    if isinstance(values, dict):
        for override in overrides:
            problem = _apply(values, override)
            if problem:
                problems.append(f"override {override!r}: {problem}")
    try:
        result = validate_model(Recipe, values, where, error=UsageError)
    except UsageError as error:
        problems.append(str(error))
    if problems:
        raise UsageError("; ".join(problems))
    return result


def without_effect(recipe: Recipe, overrides: Sequence[str], *, swapped: bool) -> list[str]:
    """What is asked for and changes nothing beside the rest of a recipe: "lora.rank (mode is full)" for each such key.

    Args:
        recipe: the recipe, overrides applied.
        overrides: as for `load_recipe`: recipes write every key out, so only these and adapters' settings that differ
            from the defaults are taken to be asked for.
        swapped: whether the model has swapped layers.
    """
    adapters = [f"lora.{key}" for key in LoraRecipe.model_fields]
    unused = dict.fromkeys(adapters, f"mode is {recipe.mode}") if recipe.mode not in ADAPTER_MODES else {}
    asked = {override.partition("=")[0].strip() for override in overrides}
    asked |= {key for key in adapters if _changed(recipe.lora, key.removeprefix("lora."))}
    if recipe.mode == "new":
        unused["lr"] = "mode is new, which trains by lr_new"
    if not swapped:
        unused |= dict.fromkeys(("lr_new", "importance_every"), "no layer is swapped")
    if recipe.schedule == "constant":
        unused["min_lr_ratio"] = "schedule is constant"
    if not recipe.save_every:
        unused["keep"] = "save_every is 0"
    if recipe.data.val is not None:
        unused["data.val_fraction"] = "data.val is given"
    elif not recipe.data.val_fraction:
        unused |= dict.fromkeys(("eval_every", "eval_windows"), "no text is held out")
    return [f"{key} ({reason})" for key, reason in unused.items() if key in asked]


def _changed(part: LoraRecipe, key: str) -> bool:
    return getattr(part, key) != LoraRecipe.model_fields[key].get_default(call_default_factory=True)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every key written out: what a run folder keeps."""
    return dump_yaml(recipe)


def _apply(values: dict, override: str) -> str | None:
    """Sets one dotted key in `values`; returns what is wrong with the override, if anything."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        return "expected key=value, for example lr=1e-4 or data.seq_len=512"
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # the date 2024-99-99, a number of thousands of digits
        return f"the value {text[:100]!r} is not YAML; quote it"
    *parents, last = key.strip().split(".")
    for parent in parents:
        inner = values.get(parent)
        inner = dict(inner) if isinstance(inner, dict) else {}
        values[parent] = inner
        values = inner
    values[last] = value
    # A length in steps replaces one in tokens and the other way round.
    if not parents and value is not None and last in ("steps", "tokens"):
        values["tokens" if last == "steps" else "steps"] = None
    return None
