"""Runs a text through a model layer by layer: all of it passes one decoder layer before the next one is needed.

The model's own forward runs, once for as much text as `TEXT_BYTES` of hidden states hold, so that masks, positions and
whatever else stands around the layers are its own. Each decoder layer takes that text a few sequences at a time; its
output takes the place of its input. Memory is then the hidden states, the weights of one layer and what a few sequences
need inside it; weights that are in files are read once for each `TEXT_BYTES`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

TEXT_BYTES = 2**30
"""Of hidden states in fp32 at a time: 65,536 tokens of a model as wide as 4,096."""


class LayerFiles:
    """A model whose weights stay in a checkpoint's files, but for those of the layer at hand, in fp32.

    Args:
        checkpoint: its tensors are checked as they are read.
        device: where the layers run.

    Attributes:
        model: on `meta`.
    """

    def __init__(self, checkpoint: Checkpoint, device: str | torch.device = "cpu") -> None:
        family = checkpoint.family
        with torch.device("meta"):
            self.model = family.model_class()(family.model_config(checkpoint.config)).eval()
        self.device = torch.device(device)
        self._checkpoint = checkpoint
        self._names = {module: name for name, module in self.model.named_modules()}
        first: dict[int, str] = {}
        tensors = self.model.state_dict(keep_vars=True).items()
        self._stored = {name: first.setdefault(id(tensor), name) for name, tensor in tensors}  # what is tied, once
        self._fill_buffers()

    def _fill_buffers(self) -> None:
        """What no file has, such as the frequencies of rotary embeddings, by the host's own initialization."""
        found = False
        for module in self.model.modules():
            for name in module._non_persistent_buffers_set:
                if (buffer := getattr(module, name)) is not None:
                    setattr(module, name, torch.empty_like(buffer, device=self.device))
                    found = True
        if found:
            self.model.initialize_weights()  # of the weights, which are on `meta`, this does nothing

    def _load(self, name: str) -> Tensor:
        return self._checkpoint.load_whole(self._stored[name]).to(self.device, torch.float32)

    @contextmanager
    def layer(self, layer: nn.Module) -> Iterator[None]:
        """The weights of a decoder layer are in memory while the block runs."""
        name, empty = self._names[layer], layer.state_dict()
        filled = {key: self._load(f"{name}.{key}") for key in empty}
        layer.load_state_dict(filled, strict=True, assign=True)
        try:
            yield
        finally:
            layer.load_state_dict(empty, strict=True, assign=True)

    @contextmanager
    def embedding(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """The rows of the embedding that `ids` name are in memory while the block runs; gives the numbers they have."""
        whole = self.model.get_input_embeddings()
        wanted, renumbered = np.unique(ids, return_inverse=True)
        self.model.set_input_embeddings(nn.Embedding.from_pretrained(self._rows(torch.from_numpy(wanted))))
        try:
            yield renumbered.reshape(ids.shape)
        finally:
            self.model.set_input_embeddings(whole)

    def _rows(self, wanted: Tensor) -> Tensor:
        """Rows `wanted` [n], in ascending order, of the embedding, which is read a piece at a time; fp32 [n, D]."""
        name = self._stored[f"{self._names[self.model.get_input_embeddings()]}.weight"]
        self._checkpoint.check(name)
        width = self._checkpoint.tensors[name].shape[1]
        found, first, rest = [], 0, None
        for piece in self._checkpoint.pieces(name):
            flat = piece if rest is None else torch.cat([rest, piece])
            table = flat[: len(flat) // width * width].view(-1, width)
            here = wanted[(wanted >= first) & (wanted < first + len(table))] - first
            found.append(table[here].to(self.device, torch.float32))
            first, rest = first + len(table), flat[table.numel() :].clone()
        return torch.cat(found)


class _Enough(Exception):  # noqa: N818 (nothing went wrong)
    """The last layer that is watched has run."""


@torch.no_grad()
def run_by_layer(
    model: nn.Module,
    sequences: Sequence[np.ndarray],
    *,
    batch_size: int,
    last: int,
    files: LayerFiles | None = None,
    ran: Callable[[int], Any] = lambda sequences: None,
) -> None:
    """Runs sequences through the decoder layers of a model, for whoever watches by hooks.

    Args:
        model: a causal language model of transformers; it is as it was before when the run ends, however it ends.
        sequences: token ids, arrays of any lengths. Those of a length go together, so that no token is padding.
        batch_size: sequences at a time inside a layer.
        last: number of the decoder layer after which the run ends; the head is never reached.
        files: where the model's weights are, unless it has them.
        ran: called with the number of sequences that have passed a layer.
    """
    decoder = model.get_decoder()
    device = model.get_input_embeddings().weight.device if files is None else files.device
    placed = (lambda layer: nullcontext()) if files is None else files.layer

    def run(layer: nn.Module, forward: Callable, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with placed(layer):
            output = _in_pieces(forward, batch_size, ran, hidden, args, kwargs)
        if layer is decoder.layers[last]:
            raise _Enough
        return output

    for ids in _texts(sequences, batch_size, 4 * model.get_input_embeddings().embedding_dim):
        with (
            nullcontext(ids) if files is None else files.embedding(ids) as rows,
            _forwards(decoder.layers, run),
            suppress(_Enough),
        ):
            decoder(input_ids=torch.as_tensor(rows, dtype=torch.long, device=device), use_cache=False)


def _texts(sequences: Sequence[np.ndarray], batch_size: int, token_bytes: int) -> Iterator[np.ndarray]:
    """Sequences of one length, [B, T]: whole batches of them, as many as `TEXT_BYTES` hold."""
    for length, same in itertools.groupby(sorted(sequences, key=len), key=len):
        same = list(same)
        batches = max(1, TEXT_BYTES // (token_bytes * length * batch_size))
        for start in range(0, len(same), batches * batch_size):
            yield np.stack(same[start : start + batches * batch_size])


@contextmanager
def _forwards(layers: Sequence[nn.Module], run: Callable) -> Iterator[None]:
    """`run(layer, its forward, ...)` stands in for the forward of each layer."""
    own = [vars(layer).get("forward") for layer in layers]  # as hooks of accelerate leave it
    try:
        for layer in layers:
            layer.forward = partial(run, layer, layer.forward)
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward


def _in_pieces(
    forward: Callable, rows: int, ran: Callable[[int], Any], hidden: Tensor, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """What `forward` gives for the batch `hidden` [B, T, D], taken `rows` at a time; it is written into `hidden`.

    What is given besides and has one entry a row of the batch is cut like it.
    """
    batch, output = len(hidden), None
    for start in range(0, batch, rows):
        part = slice(start, start + rows)

        def cut(value: Any, part: slice = part) -> Any:
            return value[part] if isinstance(value, Tensor) and value.ndim and len(value) == batch else value

        output = forward(hidden[part], *map(cut, args), **{key: cut(value) for key, value in kwargs.items()})
        piece = output[0] if isinstance(output, tuple) else output
        hidden = hidden.to(piece.dtype)  # a residual stream may be wider than the embedding
        hidden[part] = piece
        ran(len(piece))
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
