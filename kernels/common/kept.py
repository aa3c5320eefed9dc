"""What a scan gave, kept between the two runs of a piece of a model under gradient checkpointing.

The backward pass of the scans that use this needs their inputs only, and what stands after them needs their outputs. So
when gradient checkpointing runs a block again, the outputs of its first run serve, and the scan's forward runs once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager

from torch import Tensor

_place = threading.local()


class KeptOutputs:
    """The outputs of the scans of one piece of a model, in the order of their calls; one object for each forward pass.

    The first time that the piece runs inside `use` fills it, every later time reads it; the inputs must be the same.
    """

    def __init__(self) -> None:
        self._outputs: list[tuple[Tensor | None, ...]] = []
        self._versions: list[tuple[int | None, ...]] = []
        self._next = 0

    @contextmanager
    def use(self):
        """The scans called inside, in this thread, keep what they give, or give what was kept."""
        before = getattr(_place, "kept", None)
        _place.kept, self._next = self, 0
        try:
            yield self
        finally:
            _place.kept = before

    def _of(self, run: Callable[[], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
        place, self._next = self._next, self._next + 1
        # What a caller has written over since is not the output any more.
        if place < len(self._outputs) and _versions(self._outputs[place]) == self._versions[place]:
            return _aliases(self._outputs[place])
        found = run()
        if place == len(self._outputs):
            # Aliases: autograd hangs its graph on the tensors that are returned, and the graph would hold on to itself.
            self._outputs.append(_aliases(found))
            self._versions.append(_versions(found))
        return found


def kept(run: Callable[[], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """What `run` gives, from an earlier run where `KeptOutputs` is in use; for the forward of an autograd function."""
    store = getattr(_place, "kept", None)
    return run() if store is None else store._of(run)


def _aliases(outputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else x.detach() for x in outputs)


def _versions(outputs: tuple[Tensor | None, ...]) -> tuple[int | None, ...]:
    # A tensor of inference mode has no version, and no backward pass either.
    return tuple(None if x is None or x.is_inference() else x._version for x in outputs)
