"""One server's block of a tensor, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import DTYPES
from aiodist.ps.answers import Pulling, Pushing, Restored
from aiodist.ps.context import Context
from aiodist.ps.optimizers import OptimizerRule
from aiodist.ps.readers import Reader, Readers
from aiodist.ps.rules import RULES, Rule
from aiodist.ps.settings import Span
from aiodist.ps.wire import Reads


class Block:
    """A server's block of a tensor, as the call `make` describes it."""

    def __init__(self, context: Context, call: dict[str, Any]) -> None:
        self.key: int = call["key"]
        self.name: str = call["name"]
        self.dtype = DTYPES[call["dtype"]]
        self.pushed_dtype = self.dtype
        """Dtype of pushed values that are not encoded."""
        self.numel: int = call["numel"]
        self.shape = tuple(call["shape"])
        """Shape of the whole tensor."""
        self.replaces: bool = call["codec"]
        """True if the block is the code of an object, which a push replaces."""
        self.rule: Rule = context.rules[call["rule"]]
        """Default rule of a push."""
        self.spans = [Span(*span) for span in call["spans"]]
        """Blocks of all servers, in order. The first server leads the tensor."""
        self.number = [span.rank for span in self.spans].index(context.rank)
        """Number of this block."""

    @property
    def start(self) -> int:
        """First element of the block."""
        return self.spans[self.number].start

    @property
    def servers(self) -> list[int]:
        """Ranks of all servers of the tensor."""
        return [span.rank for span in self.spans]


class BlockMemory:
    """The memory of a block, with the states of its rules and its readers (transport lock held).

    A change first moves the block to other memory if a checkpoint or slow readers use the memory.
    """

    def __init__(self, context: Context, block: Block) -> None:
        self._context = context
        self._replaces = block.replaces
        self.data = context.pool.take(block.numel * block.dtype.itemsize).view(block.dtype)
        """Values, flat."""
        self.readers = Readers(context)
        self.waits_for_readers = False
        """True if a step waits for readers however long they take."""
        self._states: dict[int, Any] = {}
        self.uses: set[str] = set()
        """Uses for which a change takes other memory: "lent" to a checkpoint, "left" to slow readers."""
        self._borrowed: Tensor | None = None
        """Memory that a checkpoint is written from."""

    def state(self, rule: Rule) -> Any:  # noqa: ANN401
        """Return the state of a rule, made at first use."""
        if id(rule) not in self._states:
            self._states[id(rule)] = rule.state(self.data)
        return self._states[id(rule)]

    def state_of(self, rule: Rule) -> Any:  # noqa: ANN401
        """Return the state of a rule, or None before its first use."""
        return self._states.get(id(rule))

    # --- readers and checkpoints -------------------------------------------------------------------------------

    def hold(self, request: Pulling) -> None:
        """Keep the memory until `release`, and unchanged unless the read is lock-free."""
        self.readers.hold((request.client, request.number), self.data, snapshot=request.reads == Reads.SNAPSHOT)

    def release(self, reader: Reader) -> None:
        """End a read. Memory that was left to the reader returns to the pool if no other reader has it."""
        memory = self.readers.release(reader)
        if memory is None or self._replaces or memory is self.data or memory is self._borrowed:
            return
        if not self.readers.see(memory):
            self._context.pool.release(memory.view(torch.uint8))

    def leave_to_readers(self, retry: Callable[[], object]) -> bool:
        """Leave the memory to readers that take long. Return False while a step waits for them, and `retry` later."""
        if self.waits_for_readers or not self._movable or not self.readers.leave_to(self.data, retry):
            return False
        if not self._replaces:
            self.uses.add("left")
        return True

    def lend(self) -> Callable[[], None] | None:
        """Keep memory and states unchanged until the returned function is called, in any thread.

        Returns None if only the rules can copy their states, and for an object.
        """
        if self._replaces or not self._movable:
            return None
        self._borrowed = lent = self.data
        self.uses.add("lent")

        def release_lent() -> None:
            self.uses.discard("lent")
            self._borrowed = None
            if self.data is not lent and not self.readers:
                self._context.pool.release(lent.view(torch.uint8))

        return release_lent

    @property
    def _movable(self) -> bool:
        """True unless only the rules can copy their states."""
        rules = (rule for rule in self._context.rules if self.state_of(rule) is not None)
        return all(isinstance(rule, OptimizerRule) for rule in rules)

    def copied(self, context: Context, version: int) -> Restored:
        """Return copies of values and states, in memory of `context`, perhaps of another communicator."""
        data = context.pool.take(self.data.nbytes).view(self.data.dtype)
        data.copy_(self.data)
        restored = Restored(version, data)
        for number, rule in enumerate(context.rules):
            if (state := self.state_of(rule)) is not None:
                restored.states[number] = made = rule.state(data)
                rule.load_state_dict(made, rule.state_dict(state))
        return restored

    # --- changes -------------------------------------------------------------------------------------------------

    def make_private(self) -> None:
        """Move to other memory, before a change, if a checkpoint is written from this memory or readers keep it."""
        if "lent" in self.uses:
            self._move_to(self.copied(self._context, 0))
        elif "left" in self.uses:
            data = self._context.pool.take(self.data.nbytes).view(self.data.dtype)
            data.copy_(self.data)
            self.data = data
            self.uses.clear()
            for rule in self._context.rules:
                if isinstance(rule, OptimizerRule) and (state := self.state_of(rule)) is not None:
                    rule.move(state, data)

    def restore(self, restored: Restored) -> None:
        """Take the memory and the states of a checkpoint."""
        if not self.uses:
            self._context.pool.release(self.data.view(torch.uint8))
        self._move_to(restored)

    def _move_to(self, restored: Restored) -> None:
        self.data = restored.data
        self.uses.clear()
        self._states = {id(self._context.rules[number]): state for number, state in restored.states.items()}

    def swap(self, pushes: Sequence[tuple[Pushing, float]]) -> bool:
        """Take the buffer of a single push by `copy` as the memory, and return True, if no read prevents that."""
        if len(pushes) != 1 or self.readers.lookers or any(state is not None for state in self._states.values()):
            return False
        push, weight = pushes[0]
        copies = self._context.rules[push.rule] is RULES["copy"] and weight == push.alpha == 1
        if not copies or self._replaces or push.buffer is None or push.coded or push.value is None:
            return False
        self.data, push.buffer = push.value, None if self.uses else self.data.view(torch.uint8)
        self.uses.clear()
        return True
