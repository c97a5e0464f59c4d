"""The rows of one server, and what its optimizer keeps beside them: tensors that grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.ps.rows.index import RowIndex
from aiodist.ps.rows.initial import first_rows
from aiodist.ps.rows.packing import write_rows
from aiodist.ps.rows.spec import TableSpec

_LEAST_ROWS = 64


class RowStore:
    """Rows by id. Calls come one after another, from any thread, and in no torch mode.

    A row is made when it is first written to. Until then it reads as what it will begin with, so a read makes nothing.
    Memory: `dim` elements a row, as much again for each thing that the optimizer keeps, and the index; with room to
    grow, at most twice that, and three times while it is copied to be larger.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self.optimizer = spec.make_optimizer()
        self.steps = 0
        """Steps of the optimizer so far."""
        self._index = RowIndex()
        self._columns: dict[str, Tensor] = {}
        fresh = {"rows": 0.0} | ({} if self.optimizer is None else self.optimizer.fresh())
        self._fresh: Mapping[str, float] = fresh
        for name in fresh:
            self._columns[name] = self._new(0)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that there are, and of what lies beside them."""
        return len(self) * sum(column.shape[1] * column.itemsize for column in self._columns.values())

    def has_room(self, count: int) -> bool:
        """Return whether so many rows can be made without growing."""
        return len(self) + count <= self._columns["rows"].shape[0]

    # --- reading -----------------------------------------------------------------------------------------------

    def read(self, ids: Tensor, into: Tensor) -> None:
        """Write the rows of `ids` into `into`, `(len(ids), dim)`."""
        slots = self._index.find(ids)
        missing = (slots < 0).nonzero().flatten()
        if not missing.numel():
            torch.index_select(self._columns["rows"], 0, slots, out=into)
            return
        if missing.numel() < ids.numel():
            torch.index_select(self._columns["rows"], 0, slots.clamp_(min=0), out=into)
        first = into.new_empty(missing.numel(), self._spec.dim)
        first_rows(self._spec.init, self._spec.seed, ids[missing], first)
        into.index_copy_(0, missing, first)

    # --- writing -----------------------------------------------------------------------------------------------

    def step(self, ids: Tensor, gradient: Tensor) -> None:
        """Do a step of the optimizer for these rows, each of them there once; `gradient` is only read."""
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
            write_rows(self._columns[name], slots, changed)

    def add(self, ids: Tensor, values: Tensor, factor: float = 1.0) -> None:
        """Add `factor * values` to these rows, each of them there once."""
        slots = self._slots(ids)  # first: it may move the rows
        self._columns["rows"].index_add_(0, slots, values, alpha=factor)

    def copy(self, ids: Tensor, values: Tensor) -> None:
        """Replace these rows, each of them there once; what the optimizer keeps stays."""
        slots = self._slots(ids)
        write_rows(self._columns["rows"], slots, values)

    def _slots(self, ids: Tensor) -> Tensor:
        """Return the slots of `ids`; make the rows that are not there."""
        slots = self._index.find(ids)
        missing = (slots < 0).nonzero().flatten()
        if missing.numel():
            made = ids[missing]
            start, stop = len(self), len(self) + missing.numel()
            self._reserve(stop)
            first_rows(self._spec.init, self._spec.seed, made, self._columns["rows"][start:stop])
            for name, value in self._fresh.items():
                if name != "rows":
                    self._columns[name][start:stop] = value
            slots[missing] = self._index.add(made)
        return slots

    def _reserve(self, count: int) -> None:
        for name, column in self._columns.items():
            if count > column.shape[0]:
                grown = self._new(max(count, 2 * len(self), _LEAST_ROWS))
                grown[: len(self)] = column[: len(self)]
                self._columns[name] = grown

    def _new(self, rows: int) -> Tensor:
        return torch.empty(rows, self._spec.dim, dtype=self._spec.dtype)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return copies: "ids" `(n,)`, "rows" and what the optimizer keeps, `(n, dim)` each; "steps" and "settings"."""
        count = len(self)
        kept = {name: column[:count].clone() for name, column in self._columns.items()}
        return {"ids": self._index.ids.clone(), **kept, "steps": torch.tensor(self.steps), "settings": self._settings()}

    def _settings(self) -> dict[str, Any]:
        settings = {} if self.optimizer is None else self.optimizer.settings
        return {key: value for key, value in settings.items() if key != "params"}

    def load_state_dict(self, given: Mapping[str, Any], mine: Callable[[Tensor], Tensor]) -> None:
        """Take rows that a `state_dict` gave, of any server; `mine(ids)` says, in bools, which belong here.

        Rows that are there are replaced, others stay. Raises ValueError, or TypeError for another dtype, for what does
        not fit; then nothing is changed.
        """
        self._check(given)
        chosen = mine(given["ids"])
        slots = self._slots(given["ids"][chosen])
        for name, column in self._columns.items():
            write_rows(column, slots, given[name][chosen])
        self.steps = max(self.steps, int(given["steps"]))
        if self.optimizer is not None:
            self.optimizer.settings.update(given["settings"])

    def _check(self, given: Mapping[str, Any]) -> None:
        expected = {"ids", "steps", "settings", *self._columns}
        if given.keys() != expected:
            raise ValueError(f"a table's state has {', '.join(sorted(given))}: expected {', '.join(sorted(expected))}")
        if given["settings"].keys() != self._settings().keys():
            raise ValueError(f"a table's settings are {list(given['settings'])}: expected {list(self._settings())}")
        ids = given["ids"]
        if ids.dtype is not torch.int64 or given["steps"].dtype is not torch.int64:
            raise TypeError("a table's state: expected ids and steps in int64")
        self._spec.check_ids(ids)
        if ids.unique().numel() != ids.numel():
            raise ValueError("a table's state has an id twice: expected each once")
        for name in self._columns:
            seen = given[name]
            if seen.dtype is not self._spec.dtype:
                expected_dtype = dtype_name(self._spec.dtype)
                raise TypeError(f"a table's state: {name} holds {dtype_name(seen.dtype)}: expected {expected_dtype}")
            if seen.shape != (ids.numel(), self._spec.dim):
                shape = [ids.numel(), self._spec.dim]
                raise ValueError(f"a table's state: {name} has shape {list(seen.shape)}: expected {shape}")
