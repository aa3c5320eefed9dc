"""A checkpoint of any supported layout, opened lazily and accounted for to the last tensor."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..base.errors import CheckpointError
from .fingerprint import edges_fingerprint, fingerprint
from .keymap import EMBEDDING, HEAD, Rule, canonical_shape, expected_shapes, translate
from .layouts import Layout, detect
from .lazy import open_weights
from .sources import (
    Source,
    card_metadata,
    read_foreign_json,
    resolve,
    special_token_ids,
    tokenizer_files,
    weight_files,
)
from .weights import PIECE_BYTES, Extent, TensorInfo, WeightsFile

logger = logging.getLogger(__name__)

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LISTED = 8  # names in a message; the rest is counted
_READERS = 2  # threads that look at tensors; neither reading nor checksums hold up the other


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the model.

    Attributes:
        name: canonical name, as in `modeling/`.
        source_name: its name in the file.
        shape: canonical shape.
        dtype: as stored.
        file: name of the file it is in.
    """

    name: str
    source_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str


class Dropped(NamedTuple):
    """A source tensor that the model does not need, and why."""

    source_name: str
    reason: str


class _Located(NamedTuple):
    """A source tensor under its canonical name."""

    entry: TensorEntry
    info: TensorInfo
    file: WeightsFile
    rule: Rule


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Nothing is in memory until a tensor is copied or computed with.

    Attributes:
        path: its folder.
        layout: a key of `keymap.TABLES`.
        config: arguments of `PalimpsaMamba2Config`; `vocab_size` is the embedding's number of rows, `palimpsa_layers`
            the layers already swapped.
        tensors: every tensor of the model by canonical name, in the order of the model.
        dropped: source tensors that are not part of the model, each with its reason.
        source_id: Hub id, or the folder's name.
        license: licence named in the source's model card, never guessed.
        base_model: the Hub id itself, else what the source's model card names.
        tokenizer_files: paths of the tokenizer's files.
        generation_config: content of `generation_config.json`.
        notes: what a user should know of how the checkpoint was read.
    """

    path: Path
    layout: str
    config: dict[str, Any]
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    dropped: tuple[Dropped, ...]
    source_id: str
    license: str | None
    base_model: str | None
    tokenizer_files: tuple[Path, ...]
    generation_config: dict[str, Any] | None
    notes: tuple[str, ...]
    _located: Mapping[str, _Located] = field(repr=False)
    _config_file: Path = field(repr=False)
    _owners: Mapping[str, WeightsFile] = field(repr=False)

    def load(self, name: str) -> torch.Tensor:
        """Reads a tensor to the CPU, in the dtype it is stored in and in memory of its own.

        Args:
            name: canonical name.

        Raises:
            CheckpointError: the model has no such tensor, or the tensor is not sound (see `check`).
        """
        located = self._located.get(name)
        if located is None:
            raise CheckpointError(f"{self.source_id}: has no tensor {name}, expected one of the names in .tensors")
        tensor = located.file.load(located.entry.source_name)
        self.check(name, tensor)
        return tensor if located.rule.transform is None else located.rule.transform(tensor)

    def check(self, name: str, tensor: torch.Tensor | None = None) -> None:
        """Looks at every value of a tensor, the first time it is asked to.

        Args:
            name: canonical name.
            tensor: its values as they are in the file, where they are at hand.

        Raises:
            CheckpointError: a value is not finite, the bytes do not match the file's own checksum, or the file was
                changed while it was read.
        """
        located = self._located[name]
        if not located.file.contents(located.entry.source_name, tensor).finite:
            raise CheckpointError(
                f"{located.file.path.name}: tensor {located.entry.source_name} holds values that are not finite "
                "(NaN or infinity), expected a trained model's weights; use an undamaged checkpoint"
            )

    def check_all(self) -> None:
        """`check` of every tensor of the model, in its order, whatever was looked at before."""
        self._look(found.entry.source_name for found in self._located.values())
        for name in self.tensors:
            self.check(name)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The values of `load(name)` in row-major order, in pieces [n]; each is good until the next is asked for."""
        located = self._located[name]
        if located.rule.transform is None:
            yield from located.file.pieces(located.entry.source_name)
        else:
            yield from self.load(name).reshape(-1).split(PIECE_BYTES // located.entry.dtype.itemsize)

    def extent(self, name: str) -> Extent | None:
        """Where the bytes of `load(name)` lie in a file, or None when they do not lie in one piece as they are."""
        located = self._located[name]
        return None if located.rule.transform is not None else located.file.extent(located.entry.source_name)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the weights, see `fingerprint.py`: every tensor is read once for it."""
        self._look(self._owners)
        infos = {name: file.tensors[name] for name, file in self._owners.items()}
        return fingerprint(self._config_file, infos, lambda name: self._owners[name].contents(name).checksum)

    def matches(self, identity: str) -> bool:
        """Whether `identity`, read from a profile, a plan or another stage's file, is this checkpoint's fingerprint.

        A file that was written before fingerprints covered all weights is compared as it was made.
        """
        if identity == self.fingerprint:
            return True
        files = sorted({file.path for file in self._owners.values()})
        infos = {name: file.tensors[name] for name, file in self._owners.items()}
        return identity == edges_fingerprint(self._config_file, files, infos)

    def _look(self, source_names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="look") as pool:
            for _ in pool.map(lambda name: self._owners[name].contents(name), source_names):
                pass

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype that most of the weights are stored in."""
        counts: Counter[torch.dtype] = Counter()
        for entry in self.tensors.values():
            counts[entry.dtype] += int(torch.Size(entry.shape).numel())
        return counts.most_common(1)[0][0]

    @property
    def num_layers(self) -> int:
        """Number of layers, swapped or not."""
        return self.config["num_hidden_layers"]

    @property
    def palimpsa_layers(self) -> tuple[int, ...]:
        """The layers that are swapped already, sorted; empty for a plain Mamba2."""
        return tuple(self.config["palimpsa_layers"])


def open_checkpoint(src: str | Path, *, revision: str | None = None, token: str | None = None) -> Checkpoint:
    """Opens a Mamba2 checkpoint, published or already converted, without reading its weights into memory.

    Args:
        src: a folder, or a Hub id (`owner/name`), fetched through huggingface_hub's cache.
        revision: branch, tag or commit of a Hub id.
        token: Hub token; by default the stored one.

    Returns:
        The checkpoint, its layout told by content and each of its tensors accounted for.

    Raises:
        CheckpointError: nothing readable is there, the model is of a kind that is not supported, or tensors are
            missing, unexpected or of the wrong shape.
    """
    source = resolve(src, revision=revision, token=token)
    tensors = _merge([open_weights(path) for path in weight_files(source.folder)])
    layout = detect(source.folder, {name: file.tensors[name] for name, file in tensors.items()})
    located, dropped, strangers = _locate(layout, tensors)
    notes = [*layout.notes, *_resolve_vocabulary(layout, located)]
    tied = _resolve_tie(layout, located, dropped, notes)
    config = {**layout.config, "tie_word_embeddings": tied}
    config["palimpsa_layers"] = sorted(config.get("palimpsa_layers", []))
    for key, number in special_token_ids(source.folder).items():
        config[key] = number if config.get(key) is None else config[key]
    _account(source, config, located, strangers)
    for note in notes:
        logger.warning("%s: %s", source.source_id, note)
    ordered = {name: located[name] for name in expected_shapes(config)}
    return Checkpoint(
        path=source.folder,
        layout=layout.name,
        config=config,
        tensors={name: found.entry for name, found in ordered.items()},
        dropped=tuple(dropped),
        notes=tuple(notes),
        _located=ordered,
        _config_file=layout.config_file,
        _owners=tensors,
        **_surroundings(source),
    )


def _merge(files: list[WeightsFile]) -> dict[str, WeightsFile]:
    owners: dict[str, WeightsFile] = {}
    for file in files:
        for name in file.tensors:
            if name in owners:
                raise CheckpointError(
                    f"{file.path.name}: holds tensor {name}, which {owners[name].path.name} holds too; "
                    "keep one set of shards in the folder"
                )
            owners[name] = file
    if not owners:
        raise CheckpointError(f"{files[0].path.name}: holds no tensors, expected a model's weights; write it again")
    return owners


def _locate(layout: Layout, tensors: Mapping[str, WeightsFile]) -> tuple[dict[str, _Located], list[Dropped], list[str]]:
    """Source tensors by canonical name, those saved twice, and the names that no rule of the layout knows."""
    located: dict[str, _Located] = {}
    dropped: list[Dropped] = []
    strangers: list[str] = []
    for source_name, file in tensors.items():
        found = translate(source_name, layout.name)
        if found is None:
            strangers.append(source_name)
            continue
        name, rule = found
        if rule.dropped:
            dropped.append(Dropped(source_name, rule.dropped))
            continue
        info = file.tensors[source_name]
        entry = TensorEntry(name, source_name, canonical_shape(rule, info.shape), info.dtype, file.path.name)
        candidate = _Located(entry, info, file, rule)
        if name not in located:
            located[name] = candidate
        elif _same_values(located[name], candidate):
            dropped.append(Dropped(source_name, f"the same values as {located[name].entry.source_name}"))
        else:
            raise CheckpointError(
                f"{file.path.name}: {source_name} and {located[name].entry.source_name} both stand for {name} and "
                "differ; remove one of them"
            )
    return located, dropped, strangers


def _resolve_vocabulary(layout: Layout, located: dict[str, _Located]) -> list[str]:
    """Sets `vocab_size` to the rows that exist: mamba_ssm pads them beyond the size its config names."""
    holder = located.get(EMBEDDING) or located.get(HEAD)
    if holder is None or not holder.info.shape:
        return []
    rows, said = holder.info.shape[0], layout.config["vocab_size"]
    if rows < said:
        raise CheckpointError(
            f"{holder.entry.source_name}: has {rows} rows, fewer than the vocabulary of {said} in "
            f"{layout.config_file.name}; the config belongs to other weights"
        )
    layout.config["vocab_size"] = rows
    if rows > said and layout.name not in ("mamba_ssm", "codestral"):
        return [f"{layout.config_file.name} says vocab_size {said}, the embedding has {rows} rows and decides"]
    return []


def _resolve_tie(layout: Layout, located: dict[str, _Located], dropped: list[Dropped], notes: list[str]) -> bool:
    """Whether head and embedding are one matrix: the tensors decide, what the config says only where they cannot.

    A shared or repeated matrix is kept once, under the embedding's name.
    """
    embedding, head = located.get(EMBEDDING), located.get(HEAD)
    said, file = layout.says_tied, layout.config_file.name
    if embedding is None or head is None:
        present = embedding or head
        if present is None or said is False:
            return False  # what is missing is listed by the accounting
        located.pop(HEAD, None)
        located[EMBEDDING] = present._replace(entry=_renamed(present.entry, EMBEDDING))
        if said is None:
            notes.append(f"{file} does not say whether head and embedding are tied; only one is stored, so they are")
        return True
    if embedding.info.storage == head.info.storage and embedding.info.shape == head.info.shape:
        reason = "shares its storage with the embedding"
    elif said and _same_values(embedding, head):
        reason = "the same values as the embedding, to which it is tied"
    else:
        if said:
            notes.append(f"{file} says that head and embedding are tied, but their values differ: kept as two matrices")
        return False
    if said is False:
        notes.append(f"{file} says that head and embedding are not tied, but they share storage: kept as one matrix")
    del located[HEAD]
    dropped.append(Dropped(head.entry.source_name, reason))
    return True


def _renamed(entry: TensorEntry, name: str) -> TensorEntry:
    return TensorEntry(name, entry.source_name, entry.shape, entry.dtype, entry.file)


def _same_values(first: _Located, second: _Located) -> bool:
    """Bit for bit."""
    if (first.info.shape, first.info.dtype) != (second.info.shape, second.info.dtype):
        return False
    if first.info.storage == second.info.storage:
        return True
    one, two = (found.file.load(found.entry.source_name).reshape(-1) for found in (first, second))
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def _account(source: Source, config: dict[str, Any], located: Mapping[str, _Located], strangers: list[str]) -> None:
    """Refuses a checkpoint unless its tensors are exactly those the config calls for."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in located]
    extra = [*strangers, *(found.entry.source_name for name, found in located.items() if name not in expected)]
    wrong = [
        f"{found.entry.source_name} is {list(found.entry.shape)} instead of {list(expected[name])}"
        for name, found in located.items()
        if name in expected and found.entry.shape != expected[name]
    ]
    odd = [found.entry.source_name for found in located.values() if found.entry.dtype not in _FLOATS]
    parts = [
        f"{len(names)} {what} ({_listing(names)})"
        for names, what in (
            (missing, "missing"),
            (extra, "unexpected"),
            (wrong, "of another shape than the config gives"),
            (odd, "not in a floating-point dtype"),
        )
        if names
    ]
    if parts:
        raise CheckpointError(
            f"{source.source_id}: the tensors are not those of the model in its config: {', '.join(parts)}; "
            "complete the checkpoint, or give it the config it was saved with"
        )


def _listing(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _surroundings(source: Source) -> dict[str, Any]:
    """What lies beside the weights: licence, base model, tokenizer, generation config."""
    card = card_metadata(source.folder)
    base = source.source_id if source.hub else _one_name(card.get("base_model"))
    generation = source.folder / "generation_config.json"
    return {
        "source_id": source.source_id,
        "license": _one_name(card.get("license")),
        "base_model": base,
        "tokenizer_files": tokenizer_files(source.folder),
        "generation_config": read_foreign_json(generation) if generation.is_file() else None,
    }


def _one_name(value: Any) -> str | None:
    """A card's key that may hold one name or a list of them: the name when there is exactly one."""
    names = value if isinstance(value, list) else [value]
    return names[0] if len(names) == 1 and isinstance(names[0], str) else None
