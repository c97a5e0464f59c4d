"""The rows of a table on one server, their optimizer state, and the slot of each id, in tensors that grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from aiodist import _core
from aiodist.backends.base import dtype_name
from aiodist.ps.optimizers import OptimizerRule
from aiodist.ps.rows import TableSpec

_LEAST_CELLS = 64
_LEAST_ROWS = 64


class RowIndex:
    """Slots 0, 1, 2, ... of ids, which are int64 and not negative, in the order of their addition.

    A hash table for batches of ids, in the core (`core/rows.h`): at most half full; 24 to 48 bytes for each id, with
    the list of ids. One thread at a time may use it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")  # by slot, with room to grow
        self._make(_LEAST_CELLS)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Tensor:
        """All ids, by slot. The view is valid until the next `add`."""
        return self._ids[: self._count]

    def find(self, ids: Tensor) -> Tensor:
        """Return the slot of each id, or -1 for an unknown id."""
        ids = ids.contiguous()
        slots = torch.empty(ids.numel(), dtype=torch.int64, device="cpu")
        _core.rows_find(*self._table, ids.data_ptr(), ids.numel(), slots.data_ptr())
        return slots

    def add(self, ids: Tensor) -> Tensor:
        """Add distinct new `ids`, and return their slots, the next ones."""
        first, count = self._count, self._count + ids.numel()
        if count > self._ids.numel():
            grown = torch.empty(max(count, 2 * self._ids.numel()), dtype=torch.int64, device="cpu")
            grown[:first] = self.ids
            self._ids = grown
        self._ids[first:count] = ids
        self._count = count
        entered = first
        if 2 * count > self._cells.shape[0]:
            self._make(1 << (2 * count - 1).bit_length())
            entered = 0
        _core.rows_add(*self._table, self._ids[entered:].data_ptr(), count - entered, entered)
        return torch.arange(first, count, device="cpu")

    def _make(self, size: int) -> None:
        self._cells = torch.full((size, 2), -1, device="cpu")  # id and slot
        self._table = self._cells.data_ptr(), size - 1


_KEPT: Mapping[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: (),
    torch.optim.Adagrad: ("sum",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
}
_NEUTRAL = {"momentum": 0, "weight_decay": 0, "nesterov": False, "dampening": 0, "amsgrad": False}
"""Settings that would change rows without a push, with their neutral values."""


class RowOptimizer:
    """A rule such as `SGD(lr=0.1)` for the rows of one table: only pushed rows change, and their state.

    The steps equal those of torch for sparse gradients: `SGD`, `Adagrad`, and `SparseAdam` for Adam. Steps are counted
    for the table, as torch counts them for a parameter, not for each row.
    """

    def __init__(self, rule: OptimizerRule, dtype: torch.dtype) -> None:
        """Raise TypeError unless the rule is SGD, Adagrad or Adam, ValueError for settings that rows cannot have."""
        if rule.kind not in _KEPT:
            raise TypeError(f"{rule.name} of rows: expected SGD, Adagrad or Adam, which torch has for sparse gradients")
        _check_neutral(rule.name, rule.settings)
        self._rule = rule
        with torch.inference_mode(False):
            self._nothing = torch.empty(0, dtype=dtype, device="cpu")
            self._state = rule.state(self._nothing)

    @property
    def settings(self) -> dict[str, Any]:
        return self._state.optimizer.param_groups[0]

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings from the next step on. Raises as `OptimizerRule.configure`, and changes nothing then."""
        _check_neutral(self._rule.name, changes)
        self._rule.configure(self._state, **changes)

    def fresh(self) -> dict[str, float]:
        """Return the optimizer state of a new row: by name the value of all elements."""
        return dict.fromkeys(_KEPT[self._rule.kind], self.settings.get("initial_accumulator_value", 0.0))

    @property
    def factor(self) -> float | None:
        """Factor of the gradient if a step only adds the gradient to the rows, otherwise None."""
        if self._rule.kind is not torch.optim.SGD:
            return None
        lr = float(self.settings["lr"])
        return lr if self.settings["maximize"] else -lr

    def step(self, rows: Tensor, gradient: Tensor, columns: dict[str, Tensor], steps: int) -> None:
        """Change `rows` and their state, which are copies of the table's; all are `(n, dim)`.

        `steps` is the number of this step, from 1.
        """
        made, parameter = self._state
        settings = self.settings
        eps = settings["eps"]
        if "betas" in settings:  # SparseAdam adds eps to the root, Adam to the root divided by this factor
            settings["eps"] = eps / math.sqrt(1 - settings["betas"][1] ** steps)
        parameter.data = rows
        made.state[parameter] = {"step": torch.tensor(float(steps - 1), device="cpu"), **columns}
        try:
            self._rule.apply(rows, gradient, 1.0, self._state)
        finally:
            settings["eps"] = eps
            made.state.clear()
            parameter.data = self._nothing


def _check_neutral(name: str, settings: Mapping[str, Any]) -> None:
    unfit = sorted(key for key, neutral in _NEUTRAL.items() if settings.get(key, neutral) != neutral)
    if unfit:
        raise ValueError(f"{name} of rows: {', '.join(unfit)}: expected settings that change only pushed rows")


def optimizer_of(spec: TableSpec) -> RowOptimizer | None:
    return None if spec.optimizer is None else RowOptimizer(spec.optimizer, spec.dtype)


class RowStore:
    """Rows by id. Calls come one after another, from any thread, and in no torch mode.

    The first write makes a row. A read of a row that does not exist returns its first values and makes no row. Memory:
    `dim` elements a row, as much again for each column of the optimizer, and the index; with room to grow at most twice
    that, and three times while memory is copied to grow.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self.optimizer = optimizer_of(spec)
        self.steps = 0
        """Steps of the optimizer so far."""
        self._index = RowIndex()
        self._fresh = {} if self.optimizer is None else self.optimizer.fresh()
        self._columns = {name: self._new(0) for name in ("rows", *self._fresh)}

    def __len__(self) -> int:
        return len(self._index)

    def has_room(self, count: int) -> bool:
        return len(self) + count <= self._columns["rows"].shape[0]

    def read(self, ids: Tensor, into: Tensor) -> None:
        slots = self._index.find(ids)
        missing = (slots < 0).nonzero().flatten()
        if missing.numel() < ids.numel():
            torch.index_select(self._columns["rows"], 0, slots.clamp_(min=0) if missing.numel() else slots, out=into)
        if missing.numel():
            first = into.new_empty(missing.numel(), self._spec.dim)
            self._spec.first_rows(ids[missing], first)
            into.index_copy_(0, missing, first)

    def step(self, ids: Tensor, gradient: Tensor) -> None:
        """Do a step of the optimizer for these distinct rows; `gradient` is only read."""
        optimizer = self.optimizer
        assert optimizer is not None
        self.steps += 1
        if not ids.numel():
            return
        if (factor := optimizer.factor) is not None:
            self.add(ids, gradient, factor)
            return
        slots = self._slots(ids)
        found = {name: column.index_select(0, slots) for name, column in self._columns.items()}
        rows = found.pop("rows")
        optimizer.step(rows, gradient, found, self.steps)
        for name, changed in (("rows", rows), *found.items()):
            _write(self._columns[name], slots, changed)

    def add(self, ids: Tensor, values: Tensor, factor: float = 1.0) -> None:
        slots = self._slots(ids)  # may move the rows
        self._columns["rows"].index_add_(0, slots, values, alpha=factor)

    def copy(self, ids: Tensor, values: Tensor) -> None:
        """Replace these distinct rows, without a change of their optimizer state."""
        slots = self._slots(ids)  # may move the rows
        _write(self._columns["rows"], slots, values)

    def _slots(self, ids: Tensor) -> Tensor:
        """Return the slots of `ids`, and make missing rows."""
        slots = self._index.find(ids)
        missing = (slots < 0).nonzero().flatten()
        if missing.numel():
            made = ids[missing]
            start, stop = len(self), len(self) + missing.numel()
            for name, column in self._columns.items():
                if stop > column.shape[0]:
                    grown = self._new(max(stop, 2 * start, _LEAST_ROWS))
                    grown[:start] = column[:start]
                    self._columns[name] = grown
            self._spec.first_rows(made, self._columns["rows"][start:stop])
            for name, value in self._fresh.items():
                self._columns[name][start:stop] = value
            slots[missing] = self._index.add(made)
        return slots

    def _new(self, rows: int) -> Tensor:
        return torch.empty(rows, self._spec.dim, dtype=self._spec.dtype, device="cpu")

    def state_dict(self) -> dict[str, Any]:
        """Return copies: "ids" `(n,)`, "rows" and columns of the optimizer, `(n, dim)`; "steps" and "settings"."""
        count = len(self)
        kept = {name: column[:count].clone() for name, column in self._columns.items()}
        return {"ids": self._index.ids.clone(), **kept, "steps": self.steps, "settings": self._settings()}

    def _settings(self) -> dict[str, Any]:
        settings = {} if self.optimizer is None else self.optimizer.settings
        return {key: value for key, value in settings.items() if key != "params"}

    def load_state_dict(self, given: Mapping[str, Any], mine: Callable[[Tensor], Tensor]) -> None:
        """Load rows of a `state_dict` of any server. `mine(ids)` returns True for each row of this server.

        Other rows stay. Raises ValueError if the state does not fit, and changes nothing then.
        """
        expected = {"ids", "steps", "settings", *self._columns}
        if given.keys() != expected or given["settings"].keys() != self._settings().keys():
            raise ValueError(f"a table's state has {', '.join(sorted(given))}: expected {', '.join(sorted(expected))}")
        ids = given["ids"]
        for name in self._columns:
            kind, shape = given[name].dtype, tuple(given[name].shape)
            if kind is not self._spec.dtype or shape != (ids.numel(), self._spec.dim):
                wanted = f"{dtype_name(self._spec.dtype)} {[ids.numel(), self._spec.dim]}"
                raise ValueError(f"a table's state: {name} is {dtype_name(kind)} {list(shape)}: expected {wanted}")
        if ids.dtype is not torch.int64 or ids.unique().numel() != ids.numel():
            raise ValueError("a table's state: expected ids in int64, each once")
        self._spec.check_ids(ids)
        chosen = mine(ids)
        slots = self._slots(ids[chosen])
        for name, column in self._columns.items():
            _write(column, slots, given[name][chosen])
        self.steps = max(self.steps, int(given["steps"]))
        if self.optimizer is not None:
            self.optimizer.settings.update(given["settings"])


def _write(into: Tensor, at: Tensor, rows: Tensor) -> None:
    """Copy rows to `at`, in units of 16 bytes if possible, which takes half of the time."""
    if all(_is_wide(t) for t in (into, rows)):
        into, rows = into.view(torch.complex128), rows.view(torch.complex128)
    into.index_copy_(0, at, rows)


def _is_wide(t: Tensor) -> bool:
    starts = (t.data_ptr(), t.storage_offset() * t.itemsize, t.shape[1] * t.itemsize)
    return t.is_contiguous() and not any(nbytes % 16 for nbytes in starts)
