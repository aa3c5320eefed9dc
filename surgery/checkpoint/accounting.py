"""The tensors of the files under the names of the model: each is of the model, dropped with a reason, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...base.errors import CheckpointError
from ...kernels.common.precision import DTYPES, dtype_name
from ..families.mamba2 import EMBEDDING, HEAD
from .keymap import Rule, canonical_shape
from .layouts import Layout
from .weights import TensorInfo, WeightsFile

_LISTED = 8  # names in a message; the rest is counted


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


class Located(NamedTuple):
    """A source tensor under its canonical name."""

    entry: TensorEntry
    info: TensorInfo
    file: WeightsFile
    rule: Rule


def merge(files: list[WeightsFile]) -> dict[str, WeightsFile]:
    """The file of each tensor; `CheckpointError` where two hold one of the same name, or none holds any."""
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


def check_index(weight_map: Mapping[str, str], layout: Layout, owners: Mapping[str, WeightsFile]) -> None:
    """Refuses an index that names another file for a tensor than the one that holds it, or one that none holds.

    A head that the config ties to the embedding is stored once, as the embedding, and many an index lists it all the
    same.
    """
    for name, file in weight_map.items():
        if name in owners and owners[name].path.name == file:
            continue
        if name not in owners and layout.says_tied and _is_spare(name, layout):
            continue
        raise CheckpointError(
            f"{file}: does not hold tensor {name}, which the index of the shards says is in it; download or write "
            "index and shards again"
        )


def _is_spare(name: str, layout: Layout) -> bool:
    if layout.names is not None:
        return layout.names.is_spare(name)
    return (layout.translate(name) or (None,))[0] == HEAD


def locate(layout: Layout, tensors: Mapping[str, WeightsFile]) -> tuple[dict[str, Located], list[Dropped], list[str]]:
    """Source tensors by canonical name, those saved twice, and the names that no rule of the layout knows."""
    located: dict[str, Located] = {}
    dropped: list[Dropped] = []
    strangers: list[str] = []
    for source_name, file in tensors.items():
        found = layout.translate(source_name)
        if found is None:
            strangers.append(source_name)
            continue
        name, rule = found
        if rule.dropped:
            dropped.append(Dropped(source_name, rule.dropped))
            continue
        info = file.tensors[source_name]
        entry = TensorEntry(name, source_name, canonical_shape(rule, info.shape), info.dtype, file.path.name)
        candidate = Located(entry, info, file, rule)
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


def parts_of(located: Mapping[str, Located]) -> dict[str, tuple[str, ...]]:
    """The canonical names of the parts of each tensor of the model that is stored in several, by its name."""
    parts: dict[str, tuple[str, ...]] = {}
    for name, found in located.items():
        if found.rule.part_of is not None:
            parts[found.rule.part_of] = (*parts.get(found.rule.part_of, ()), name)
    return parts


def put_together(layout: Layout, located: Mapping[str, Located]) -> dict[str, Located]:
    """The located tensors with each that is stored in parts as one, of the shape that the parts make."""
    whole = {name: found for name, found in located.items() if found.rule.part_of is None}
    for name, parts in parts_of(located).items():
        first = located[parts[0]]
        shape = layout.names.whole_shape(name, {part: located[part].entry.shape for part in parts})
        whole[name] = first._replace(entry=replace(first.entry, name=name, shape=shape))
    return whole


def resolve_vocabulary(layout: Layout, located: dict[str, Located]) -> list[str]:
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


def resolve_tie(layout: Layout, located: dict[str, Located], dropped: list[Dropped], notes: list[str]) -> bool:
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
    return replace(entry, name=name)


def _same_values(first: Located, second: Located) -> bool:
    """Bit for bit."""
    if (first.info.shape, first.info.dtype) != (second.info.shape, second.info.dtype):
        return False
    if first.info.storage == second.info.storage:
        return True
    one, two = (found.file.load(found.entry.source_name).reshape(-1) for found in (first, second))
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def account(
    source_id: str, expected: Mapping[str, tuple[int, ...]], located: Mapping[str, Located], strangers: list[str]
) -> None:
    """Refuses a checkpoint unless its tensors are exactly those `expected`: name to shape, as the config calls for."""
    missing = [name for name in expected if name not in located]
    extra = [*strangers, *(found.entry.source_name for name, found in located.items() if name not in expected)]
    wrong = [
        f"{found.entry.source_name} is {list(found.entry.shape)} instead of {list(expected[name])}"
        for name, found in located.items()
        if name in expected and found.entry.shape != expected[name]
    ]
    odd = [found.entry for found in located.values() if found.entry.dtype not in DTYPES.values()]
    if odd:
        kinds = ", ".join(sorted({dtype_name(entry.dtype) for entry in odd}))
        raise CheckpointError(
            f"{source_id}: {_listing([entry.source_name for entry in odd])} is stored as {kinds}, expected weights in "
            "float32, bfloat16, float16 or float64; take the checkpoint from before it was quantised"
        )
    parts = [
        f"{len(names)} {what} ({_listing(names)})"
        for names, what in (
            (missing, "missing"),
            (extra, "unexpected"),
            (wrong, "of another shape than the config gives"),
        )
        if names
    ]
    if parts:
        raise CheckpointError(
            f"{source_id}: the tensors are not those of the model in its config: {', '.join(parts)}; "
            "complete the checkpoint, or give it the config it was saved with"
        )


def _listing(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
