"""What a checkpoint is, read from its config, its headers and two small tensors a layer."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from ...base.console import counted, human_count
from ...kernels.common.precision import dtype_name
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.licenses import license_text
from ..checkpoint.sources import tokenizer_file_name
from ..families.hybrids import HYBRIDS, PREFIX
from ..families.mamba2 import MAMBA2
from .forgetting import static_forgetting

SCHEMA_VERSION = 1
_OF_MODEL = ("hidden_size", "num_hidden_layers", "vocab_size", "residual_in_fp32")
_OF_MIXERS = (
    *("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
    *("use_bias", "use_conv_bias", "time_step_limit"),
)


@dataclass(frozen=True)
class LayerFigures:
    """One layer. Both figures are static estimates, from A_log and dt_bias alone.

    Attributes:
        layer: its index.
        swapped: whether it is swapped already.
        static_rate: nats forgotten a token, mean over heads.
        static_window: tokens remembered, mean over heads.
        parameters: how many numbers its mixer has, and the norm before it.
    """

    layer: int
    swapped: bool
    static_rate: float
    static_window: float
    parameters: int


@dataclass(frozen=True)
class Inspection:
    """The facts about a checkpoint that need no text and no model run.

    Attributes:
        source: Hub id or folder name.
        layout: see `Checkpoint`.
        geometry: sizes and switches of the model; an upper limit of None means none.
        parameters: numbers stored once, so a tied head is not counted.
        bytes: of those numbers as stored.
        dtypes: how many parameters are in which dtype.
        tied: whether head and embedding are one matrix.
        files: names of the weight files.
        tokenizer_files: names; empty when the folder has no tokenizer.
        fingerprint: identity of the weights.
        license: as the source's card names it.
        base_model: as the source's card names it.
        swapped_layers: layers that are swapped already.
        swapped_geometry: rank, groups, scale form of those layers.
        layers: figures of each layer that has a mixer.
        other_layers: what the layers without one are.
        dropped: source tensors that the model does not need, with reasons.
        warnings: what was odd about the checkpoint.
    """

    source: str
    layout: str
    geometry: dict[str, Any]
    parameters: int
    bytes: int
    dtypes: dict[str, int]
    tied: bool
    files: tuple[str, ...]
    tokenizer_files: tuple[str, ...]
    fingerprint: str
    license: str | list[str] | None
    base_model: str | None
    swapped_layers: tuple[int, ...]
    swapped_geometry: dict[str, Any]
    layers: tuple[LayerFigures, ...]
    other_layers: dict[int, str]
    dropped: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON."""
        return {"schema_version": SCHEMA_VERSION, "figures": "static", **asdict(self)}

    def rows(self) -> list[tuple[str, str]]:
        """Two columns, fact and value, for a table on a terminal."""
        sizes = self.geometry
        shared = "tied to the embedding" if self.tied else "a matrix of its own"
        rows = [
            ("checkpoint", self.source),
            ("layout", self.layout),
            ("parameters", f"{human_count(self.parameters)} ({_dtypes(self.dtypes)})"),
            ("layers", str(sizes["num_hidden_layers"])),
            *_other_layers(self.other_layers),
            ("width", str(sizes["hidden_size"])),
            ("heads", f"{sizes['num_heads']} of {sizes['head_dim']}, in {counted(sizes['n_groups'], 'group')}"),
            ("state size", str(sizes["state_size"])),
            ("vocabulary", f"{sizes['vocab_size']} rows, head {shared}"),
            ("swapped layers", ", ".join(map(str, self.swapped_layers)) or "none"),
            ("tokenizer", ", ".join(self.tokenizer_files) or "none in the folder"),
            ("license", license_text(self.license, "{}") or "not stated"),
            ("files", ", ".join(self.files)),
            ("fingerprint", self.fingerprint),
        ]
        rows += [("not used", f"{name}: {reason}") for name, reason in self.dropped]
        return rows + [("warning", text) for text in self.warnings]

    def layer_rows(self) -> list[tuple[int, str, float, float]]:
        """One row a layer for a table with `LAYER_HEADERS`."""
        family = HYBRIDS.get(self.layout.removeprefix(PREFIX), MAMBA2)
        return [
            (
                figures.layer,
                family.swapped if figures.swapped else family.plain,
                figures.static_window,
                figures.static_rate,
            )
            for figures in self.layers
        ]


LAYER_HEADERS = ("layer", "kind", "static window (tokens)", "static rate (nats per token)")


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Collects the facts; reads the headers and A_log and dt_bias of each layer, no other weights.

    Args:
        checkpoint: an open checkpoint.
    """
    entries = checkpoint.tensors.values()
    dtypes: Counter[str] = Counter()
    for entry in entries:
        dtypes[dtype_name(entry.dtype)] += math.prod(entry.shape)
    by_layer = {
        layer: sum(map(math.prod, site.shapes().values())) + site.geometry.hidden_size
        for layer, site in checkpoint.sites.items()
    }
    config = checkpoint.config
    return Inspection(
        source=checkpoint.source_id,
        layout=checkpoint.layout,
        geometry=_geometry(checkpoint),
        parameters=sum(dtypes.values()),
        bytes=sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries),
        dtypes=dict(dtypes.most_common()),
        tied=config.tie_word_embeddings,
        files=tuple(sorted({entry.file for entry in entries})),
        tokenizer_files=tuple(map(tokenizer_file_name, checkpoint.tokenizer_files)),
        fingerprint=checkpoint.fingerprint,
        license=checkpoint.license,
        base_model=checkpoint.base_model,
        swapped_layers=checkpoint.palimpsa_layers,
        swapped_geometry=config.gate.keys() if config.gate else {},
        layers=tuple(
            LayerFigures(figures.layer, figures.swapped, figures.rate, figures.window, by_layer[figures.layer])
            for figures in static_forgetting(checkpoint).layers
        ),
        other_layers={
            layer: checkpoint.family.kind(config, layer)
            for layer in range(checkpoint.num_layers)
            if layer not in checkpoint.sites
        },
        dropped=tuple((item.source_name, item.reason) for item in checkpoint.dropped),
        warnings=checkpoint.notes,
    )


def _other_layers(kinds: dict[int, str]) -> list[tuple[str, str]]:
    """A row for each kind of layer without a mixer."""
    return [
        (f"{kind} layers", ", ".join(str(layer) for layer in kinds if kinds[layer] == kind))
        for kind in dict.fromkeys(kinds.values())
    ]


def _geometry(checkpoint: Checkpoint) -> dict[str, Any]:
    """Sizes of the model and of its mixers, which are alike in all layers."""
    mixer = next(iter(checkpoint.sites.values())).geometry
    config = {key: getattr(checkpoint.config, key) for key in _OF_MODEL if hasattr(checkpoint.config, key)}
    return config | {key: _finite(getattr(mixer, key)) for key in _OF_MIXERS}


def _finite(value: Any) -> Any:
    """An infinite limit as None: strict JSON has no infinity."""
    if isinstance(value, (tuple, list)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _dtypes(counts: dict[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{human_count(count)} {dtype}" for dtype, count in counts.items())
