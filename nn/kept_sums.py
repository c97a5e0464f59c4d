"""Sums of gradients that `no_sync` keeps on this rank, for a later pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from aiodist.handles import Handle
from aiodist.nn.buckets import Slot
from aiodist.nn.consensus import Consensus


class KeptSums:
    """Gradients that stay between two passes, and what is added to them.

    With op="sum" a reduced gradient is the sum of all ranks. What a rank adds to it is of this rank alone, so the rank
    divides the sum first: the next pass then counts the old sum once.
    """

    def __init__(self, slots: Sequence[Slot], consensus: Consensus, op: Literal["mean", "sum"]) -> None:
        self.blocks = 0
        """Number of open `no_sync` blocks."""
        self.kept = False
        """True if gradients were added up in a `no_sync` block, and not reduced since."""
        self.divides = op == "sum" and consensus.data.size > 1
        """True if gradients are sums of several ranks, which a rank divides before a backward adds to them."""
        self._slots = slots
        self._consensus = consensus
        self._ranks = 0
        """Number of ranks whose sum the gradients are, or 0 if they are no sum."""
        self._divided: set[int] = set()
        """Parameters whose gradient was divided, since `_ranks` was set."""
        self._adders: dict[int, tuple[Node, RemovableHandle]] = {}
        """Graph node that adds to a gradient, with our hook, by parameter, in a `no_sync` block."""
        self._noted: object = None
        """End of the pass that was noted last."""
        self._lock = threading.Lock()

    @contextmanager
    def block(self) -> Iterator[None]:
        """Return the block in which backwards add up gradients on this rank."""
        self.blocks += 1
        try:
            self.hook_adders()
            yield
        finally:
            self.blocks -= 1
            if not self.blocks:
                for _, hook in self._adders.values():
                    hook.remove()
                self._adders.clear()

    def hook_adders(self) -> None:
        """In a `no_sync` block, divide each sum before autograd adds to it."""
        if not (self.divides and self.blocks):
            return
        new = [slot for slot in self._slots if slot.parameter.requires_grad and slot.index not in self._adders]
        # A hook on the node that adds to `.grad`, which the node's caller keeps: `torch.autograd.grad` adds nothing.
        with torch.inference_mode(False):
            for slot in new:
                adder = get_gradient_edge(slot.parameter).node
                self._adders[slot.index] = adder, adder.register_prehook(partial(self._divide, slot))

    @property
    def adds_to_sums(self) -> bool:
        """True if the next pass adds to a sum: in a `join` block the number of ranks with data must be known first."""
        return self._ranks > 0 and any(slot.parameter.grad is not None for slot in self._slots)

    def divide(self, ranks: int | None = None) -> None:
        """Divide all sums before a backward adds to them; `ranks` have data, if that is known."""
        if ranks is not None and self._consensus.joining and self._ranks:
            self._ranks = ranks or self._ranks
        if self._ranks and ranks != 0:
            self._consensus.loop.devices.follow()
            for slot in self._slots:
                self._divide(slot)
            self._ranks = 0

    def _divide(self, slot: Slot, _: object = None) -> None:
        """Divide one gradient; autograd calls this before it adds to the gradient, in its own thread."""
        if self._ranks and slot.index not in self._divided:
            self._divided.add(slot.index)
            if slot.parameter.grad is not None:
                with torch.no_grad():  # after a `join` block all ranks have the sum, those that trained alone too
                    slot.parameter.grad.div_(self._ranks if self._consensus.joining else self._consensus.data.size)

    def note(self, end: Handle[None], ranks: int) -> None:
        """Note once that gradients are the sums over `ranks` ranks of the pass with this `end` (any thread)."""
        with self._lock:
            if self.divides and ranks and self._noted is not end:
                self._noted = end
                self._ranks = ranks
                self._divided = set()
