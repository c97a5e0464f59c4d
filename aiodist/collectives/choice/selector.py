"""The selector, which maps operation and size to an implementation for calls that name none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from aiodist.collectives.choice.table import DEVICES, HOSTS, LIMITS, Edit, LimitEdit, RangeEdit, check_known
from aiodist.collectives.columns import columns
from aiodist.collectives.implementations import Primitives, Repertoire
from aiodist.collectives.metadata import as_bytes, as_tensor
from aiodist.control import disagreement
from aiodist.errors import BackendUnavailable, MismatchError
from aiodist.handles import Handle
from aiodist.types import OPERATIONS

_FRAME_BYTES = 192  # longest edit as text
_LARGEST = 1 << 62


class Selector:
    """The table of a communicator, which maps device, hosts, operation and size to the name of an implementation.

    `print` shows the table, and `show` a part, in the format of the file of `AIODIST_SELECTOR` or `init(selector=)`. An
    edit is valid from the next operation on, for this communicator and its splits. Earlier operations keep their
    implementation. An edit is a collective. Every rank makes the same edits in program order, relative to the
    operations of the splits too. Otherwise the handle of the edit and every later operation raise `MismatchError` with
    both sides. The handle need not be awaited. Cost: p-1 messages of 192 bytes.
    """

    def __init__(
        self, repertoire: Repertoire, publish: Callable[[Edit], Handle[None]], large_bytes: Callable[[], int]
    ) -> None:
        """`publish` applies an edit here and to the splits. `large_bytes` returns the current limit of this name."""
        self.repertoire = repertoire
        self._large_bytes = large_bytes
        self._publish = publish

    # --- reading --------------------------------------------------------------------------------------------

    def choose(self, operation: str, nbytes: int, device: str = "cpu") -> str:
        """Return the name of the implementation of `operation` on a tensor, or on an allgather's result, of `nbytes`.

        Raises ValueError for "cuda" if there is no CUDA device.
        """
        check_known("operation", operation, OPERATIONS)
        check_known("device", device, tuple(dict.fromkeys(key[0] for key in self.repertoire.table.rows)))
        return self.repertoire.choice(operation, nbytes, device)

    @property
    def limits(self) -> Mapping[str, int]:
        """Thresholds and counts in addition to the table, by name."""
        return MappingProxyType({**self.repertoire.table.limits, "large_bytes": self._large_bytes()})

    def show(self, *, operation: str | None = None, device: str | None = None, hosts: str | None = None) -> str:
        """Return the table as text, limited to the rows of `operation`, `device` and `hosts` unless None.

        A comment names the substitute if an implementation is missing here. Without arguments, the text has the limits
        too. Raises ValueError, with the known names, for an unknown one.
        """
        for what, seen, known in (("operation", operation, OPERATIONS), ("device", device, DEVICES)):
            if seen is not None:
                check_known(what, seen, known)
        if hosts is not None:
            check_known("hosts", hosts, HOSTS)
        ranges = self.repertoire.table.ranges(operation=operation, device=device, hosts=hosts)
        text = columns(
            ("device", "hosts", "operation", "from", "below", "implementation", ""),
            [(*str(edit).split(), self._instead(edit)) for edit in ranges],
        )
        if (operation, device, hosts) == (None, None, None):
            rows = [
                (*str(LimitEdit(name, value)).split(), f"# {LIMITS[name].meaning}")
                for name, value in self.limits.items()
            ]
            text += "\n" + columns(("", "name", "value", ""), rows)
        return text

    def _instead(self, edit: RangeEdit) -> str:
        ends = (edit.above, _LARGEST if edit.below is None else edit.below - 1)
        chosen = dict.fromkeys(self.repertoire.choice(edit.operation, nbytes, edit.device) for nbytes in ends)
        here = edit.hosts == self.repertoire.hosts and [*chosen] != [edit.impl]
        return f"# {', then '.join(chosen)} here" if here else ""

    def __str__(self) -> str:
        return self.show()

    # --- editing --------------------------------------------------------------------------------------------

    def set(
        self,
        operation: str,
        impl: str,
        *,
        above: int = 0,
        below: int | None = None,
        device: str = "cpu",
        hosts: str | None = None,
    ) -> Handle[None]:
        """Let `impl` run `operation` on tensors of at least `above` and less than `below` bytes (None: no upper limit).

        `hosts` selects communicators on "one" host or on "several". By default, the edit is for the kind of this
        communicator. The size is that of the tensor, for allgather of the whole result.

        Raises ValueError for unknown names, with the known ones, and for an empty range of sizes. Raises
        `BackendUnavailable`, with the reason, if the implementation is not available (see `availability`).
        """
        return self._edit(RangeEdit(device, hosts or self.repertoire.hosts, operation, above, below, impl))

    def set_limit(self, name: str, value: int) -> Handle[None]:
        """Set the threshold or count `name` (see `limits`) in a collective like `set`.

        Raises ValueError for an unknown name or a value out of range.
        """
        return self._edit(LimitEdit(name, value))

    def _edit(self, edit: Edit) -> Handle[None]:
        if (reason := self.repertoire.unavailable(edit)) is not None:
            raise BackendUnavailable(reason)
        return self._publish(edit)

    def __repr__(self) -> str:
        names = dict.fromkeys(edit.impl for edit in self.repertoire.table.ranges(hosts=self.repertoire.hosts))
        return f"<Selector of {', '.join(names)} for {self.repertoire.hosts} host(s)>"


async def compared(p: Primitives, edit: Edit, differ: Callable[[MismatchError], None]) -> None:
    """Wait until all ranks have made the same edit.

    If edits differ, call `differ` with the error, then raise the error.
    """
    frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
    packed = as_tensor(str(edit).encode())
    frame[: packed.numel()] = packed
    texts = [as_bytes(row).rstrip(b"\0").decode() for row in await p.exchange_facts(frame)]
    if len(set(texts)) > 1:
        error = MismatchError(disagreement("the edit of the selector", texts))
        differ(error)
        raise error
