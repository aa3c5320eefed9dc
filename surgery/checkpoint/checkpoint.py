"""A checkpoint of any supported layout, opened lazily and accounted for to the last tensor."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...base.errors import ChangedFileError, CheckpointError
from ..families.base import Family, Site
from ..families.hybrids import PREFIX, HybridConfig
from ..families.mamba2 import Mamba2Config
from .accounting import (
    Dropped,
    Located,
    TensorEntry,
    account,
    check_index,
    locate,
    merge,
    parts_of,
    put_together,
    resolve_tie,
    resolve_vocabulary,
)
from .fingerprint import edges_fingerprint, fingerprint
from .hosts import HostNames
from .layouts import detect
from .lazy import open_weights
from .licenses import card_metadata, license_names
from .sources import (
    Source,
    read_foreign_json,
    reading,
    resolve,
    special_token_ids,
    tokenizer_files,
    weight_files,
    weight_map,
)
from .weights import PIECE_BYTES, WeightsFile

logger = logging.getLogger(__name__)

_READERS = 2  # threads that look at tensors; neither reading nor checksums hold up the other


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Nothing is in memory until a tensor is copied or computed with.

    Attributes:
        path: its folder.
        layout: a key of `keymap.TABLES`.
        family: what kind of model it is.
        config: typed; `vocab_size` is the embedding's number of rows, `palimpsa_layers` the layers already swapped.
        tensors: every tensor of the model by canonical name, in the order of the model.
        dropped: source tensors that are not part of the model, each with its reason.
        source_id: Hub id, or the folder's name.
        license: license named in the source's model card, never guessed.
        base_model: the Hub id itself, else what the source's model card names.
        tokenizer_files: paths of the tokenizer's files.
        generation_config: content of `generation_config.json`.
        notes: what a user should know of how the checkpoint was read.
        parts: names in `tensors` of the parts of those tensors of the model that are stored in several.
    """

    path: Path
    layout: str
    family: Family
    config: Mamba2Config | HybridConfig
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    dropped: tuple[Dropped, ...]
    source_id: str
    license: str | list[str] | None
    base_model: str | None
    tokenizer_files: tuple[Path, ...]
    generation_config: dict[str, Any] | None
    notes: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]] = field(repr=False)
    _located: Mapping[str, Located] = field(repr=False)
    _config_file: Path = field(repr=False)
    _owners: Mapping[str, WeightsFile] = field(repr=False)
    _config_stamp: tuple[int, int, int] = field(repr=False)
    _names: HostNames | None = field(repr=False)

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

    def transformed(self, name: str) -> str:
        """What was done to a tensor of the files to make it the model's, in a word; "" where it is as stored."""
        transform = self._located[name].rule.transform
        return "" if transform is None else transform.__name__.strip("_")

    @property
    def files(self) -> dict[Path, dict[str, str | None]]:
        """The weight files: for each the names of its tensors, and what these are in `tensors`, None for no part."""
        canonical = {entry.source_name: name for name, entry in self.tensors.items()}
        found: dict[Path, dict[str, str | None]] = {}
        for name, file in self._owners.items():
            found.setdefault(file.path, {})[name] = canonical.get(name)
        return found

    def load_whole(self, name: str) -> torch.Tensor:
        """Reads a tensor of the model as `load` does, and puts it together where it is stored in parts."""
        parts = self.parts.get(name)
        return self.load(name) if parts is None else self._names.whole(name, {part: self.load(part) for part in parts})

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

    def refuse_replaced(self) -> None:
        """Raises `CheckpointError` where the folder is gone or holds another model now: its weights are still read to
        their end, but what is copied beside them would be that other model's."""
        with reading(self.source_id):
            now = file_stamp(self._config_file)
        if now != self._config_stamp:
            raise ChangedFileError(
                f"{self.source_id}: its {self._config_file.name} was replaced while the model was in use; put the "
                "folder back as it was and leave it alone meanwhile"
            )

    @cached_property
    def whole_of(self) -> Mapping[str, str]:
        """The tensor of the model that each of `parts` is a part of."""
        return {part: name for name, parts in self.parts.items() for part in parts}

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the weights, see `fingerprint.py`: every tensor is read once for it."""
        self._look(self._owners)
        infos = {name: file.tensors[name] for name, file in self._owners.items()}
        with reading(self.source_id):
            return fingerprint(self._config_file, infos, lambda name: self._owners[name].contents(name).checksum)

    @cached_property
    def file_digests(self) -> tuple[str, ...]:
        """sha256 of each weights file, sorted: the Hub says the same of its files without a download."""
        with reading(self.source_id):
            return tuple(sorted({file.digest() for file in self._owners.values()}))

    def matches(self, identity: str) -> bool:
        """Whether `identity`, read from a profile, a plan or another stage's file, is this checkpoint's fingerprint.

        A file that was written before fingerprints covered all weights is compared as it was made.
        """
        if identity == self.fingerprint:
            return True
        files = sorted({file.path for file in self._owners.values()})
        infos = {name: file.tensors[name] for name, file in self._owners.items()}
        with reading(self.source_id):
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

    @cached_property
    def sites(self) -> dict[int, Site]:
        """The mixers by layer, in order."""
        return self.family.sites(self.config)

    def shapes(self, config: Mamba2Config | HybridConfig) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of a model of that config, in the parts that they are stored in here."""
        found = {}
        for name, shape in self.family.shapes(config).items():
            parts = self.parts.get(name)
            found |= {part: self.tensors[part].shape for part in parts} if parts else {name: shape}
        return found

    @property
    def converted(self) -> bool:
        """Whether the folder is in this package's own layout, with swapped layers or without."""
        return self.layout.startswith(PREFIX)

    @property
    def num_layers(self) -> int:
        """Number of layers of every kind, swapped or not."""
        return self.config.num_hidden_layers

    @property
    def is_mixed(self) -> bool:
        """Whether some layers hold no mixer that can be swapped."""
        return len(self.sites) < self.num_layers

    @property
    def palimpsa_layers(self) -> tuple[int, ...]:
        """The layers that are swapped already, sorted."""
        return self.config.palimpsa_layers


def open_checkpoint(src: str | Path, *, revision: str | None = None, token: str | None = None) -> Checkpoint:
    """Opens a checkpoint with mixers that can be swapped, published or converted; its weights are not read yet.

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
    with reading(src):
        return _opened(resolve(src, revision=revision, token=token))


def _opened(source: Source) -> Checkpoint:
    tensors = merge([open_weights(path) for path in weight_files(source.folder)])
    layout = detect(source.folder, {name: file.tensors[name] for name, file in tensors.items()})
    check_index(weight_map(source.folder), layout, tensors)
    located, dropped, strangers = locate(layout, tensors)
    notes, keys = [*layout.notes], dict(layout.config)
    if layout.names is None:  # what the class of a hybrid makes of its config is known, and stays so
        notes += resolve_vocabulary(layout, located)
        keys |= {"vocab_size": layout.config["vocab_size"]}
        keys |= {"tie_word_embeddings": resolve_tie(layout, located, dropped, notes)}
    for key, number in special_token_ids(source.folder).items():
        keys[key] = number if keys.get(key) is None else keys[key]
    config = layout.family.config(layout.config_file.name, keys)
    expected = layout.family.shapes(config)
    account(source.source_id, expected, put_together(layout, located), strangers)
    for note in notes:
        logger.warning("%s: %s", source.source_id, note)
    parts = parts_of(located)
    ordered = {part: located[part] for name in expected for part in parts.get(name, (name,))}
    return Checkpoint(
        path=source.folder,
        layout=layout.name,
        family=layout.family,
        config=config,
        tensors={name: found.entry for name, found in ordered.items()},
        dropped=tuple(dropped),
        notes=tuple(notes),
        parts=parts,
        _located=ordered,
        _config_file=layout.config_file,
        _owners=tensors,
        _config_stamp=file_stamp(layout.config_file),
        _names=layout.names,
        **_surroundings(source),
    )


def file_stamp(path: Path) -> tuple[int, int, int]:
    """What changes when a file is written again or replaced."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _surroundings(source: Source) -> dict[str, Any]:
    """What lies beside the weights: license, base model, tokenizer, generation config."""
    card = card_metadata(source.folder)
    base = source.source_id if source.hub else _one_name(card.get("base_model"))
    generation = source.folder / "generation_config.json"
    return {
        "source_id": source.source_id,
        "license": license_names(card),
        "base_model": base,
        "tokenizer_files": tokenizer_files(source.folder),
        "generation_config": read_foreign_json(generation) if generation.is_file() else None,
    }


def _one_name(value: Any) -> str | None:
    """A card's key that may hold one name or a list of them: the name when there is exactly one."""
    names = value if isinstance(value, list) else [value]
    return names[0] if len(names) == 1 and isinstance(names[0], str) else None
