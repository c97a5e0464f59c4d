"""Shards in checkpoints: their values on the way to a file, and memory that was read from one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.checkpoints.format import DTYPES, TensorEntry, lay_out, write_file
from aiodist.checkpoints.format import dtype_name as name_in_files
from aiodist.checkpoints.parts import Written
from aiodist.checkpoints.reading import Reader
from aiodist.checkpoints.values import Json, decode, encode
from aiodist.errors import MismatchError
from aiodist.ps.answers import Restored
from aiodist.ps.context import Context
from aiodist.ps.row_store import RowStore
from aiodist.ps.shard import Shard
from aiodist.ps.table_shard import TableShard

KIND = "ParameterServer"
"""Kind of the only part of a checkpoint."""
_NAME = "net/tensors/"
"""Prefix of the names of tensors in files."""
Tensors = Sequence[tuple[int, str, Sequence[tuple[int, int, int]]]]
"""Key, name and spans of each tensor, as JSON."""


@dataclass
class Captured:
    """A shard at one version: its description in the manifest, as JSON, and its elements in the file."""

    said: dict[str, Json]
    written: list[Written] = field(default_factory=list)
    over: Callable[[], object] | None = None
    """Called once, when the lent memory is no longer read."""

    def release(self) -> None:
        over, self.over = self.over, None
        if over is not None:
            over()

    def add(self, name: str, t: Tensor, shape: tuple[int, ...] | None = None, start: int = 0) -> None:
        """Add `t` to the file: the elements from `start` on of a tensor of that shape, or a whole tensor."""
        entry = TensorEntry(
            name, name_in_files(t.dtype, name), tuple(t.shape) if shape is None else shape, start, t.numel()
        )
        self.written.append(Written(entry, t.reshape(-1)))


def capture(shard: Shard, context: Context) -> Captured:
    """Return the shard's values, lent if possible, otherwise copied; in any thread, while nothing changes the shard."""
    leads = shard.leader is not None
    said: dict[str, Json] = {
        "name": shard.name,
        "leads": leads,
        "marks": {"map": {context.uids[client]: number for client, number in shard.marks.items()}},
        "version": shard.version,
        "object": shard.replaces,
        "states": {},
        "table": None,
        "rows": [],
    }
    captured, path = Captured(said), f"net/states/{shard.name}"
    if isinstance(shard, TableShard):
        found: dict[str, Tensor] = {}
        said["table"] = str(shard.spec)
        said["rows"].append(encode(shard.store.state_dict(), f"{path}:rows of {shard.number}", found))
        for name, t in found.items():
            captured.add(name, t)
        return captured
    shape = (shard.memory.data.numel(),) if shard.replaces else shard.shape
    captured.over = shard.memory.lend()
    copied: Callable[[Tensor], Tensor] = Tensor.clone if captured.over is None else Tensor.detach
    captured.add(_NAME + shard.name, copied(shard.memory.data), shape, shard.start)
    for number, rule in enumerate(context.rules):
        state = shard.memory.state_of(rule)
        kept = {} if state is None else rule.state_dict(state)
        if kept:
            found = {}
            said["states"][str(number)] = {"tuple": [rule.name, encode(kept, f"{path}:{number}", found)]}
            for name, t in found.items():
                if t.dim():  # cut as the tensor is
                    captured.add(name, copied(t), (prod(shape),), shard.start)
                elif leads:
                    captured.add(name, t.clone())
    return captured


def write(file: Path, captured: Sequence[Captured], computing: set[int]) -> dict[str, Any]:
    """Write a rank's file, release lent memory as soon as it is written, and return the rank's part of the manifest."""
    found = [(each, one) for one in captured for each in one.written]
    found.sort(key=lambda each: -each[0].entry.itemsize)
    layout = lay_out([each.entry for each, _ in found])
    left = Counter(id(one) for _, one in found)

    def written(number: int) -> None:
        _, one = found[number]
        left[id(one)] -= 1
        if not left[id(one)]:
            one.release()

    sources = [each.elements.view(torch.uint8) for each, _ in found]
    facts_and_entries = write_file(file, layout, sources, computing, written)
    return {"file": facts_and_entries, "said": [one.said for one in captured if one.said]}


def tensors_in(said: Iterable[Sequence[dict[str, Json]]]) -> Json:
    """Return the manifest's description of all tensors, from the ranks' descriptions of their shards."""
    shards = [shard for each in said for shard in each]
    rows: dict[str, list[Json]] = {}
    for shard in shards:
        rows.setdefault(shard["name"], []).extend(shard["rows"])
    tensors = {
        shard["name"]: {
            "map": {key: shard[key] for key in ("version", "object", "table", "marks")}
            | {"states": {"map": shard["states"]}, "rows": rows[shard["name"]]}
        }
        for shard in shards
        if shard["leads"]
    }
    return {"map": {"tensors": {"map": tensors}}}


def described(state: Json) -> dict[str, Json]:
    """Return the descriptions of all tensors in a manifest, by name."""
    found: dict[str, Json] = state["map"]["tensors"]["map"]
    return found


def restore(shard: Shard, reader: Reader, known: Tensors, context: Context) -> Restored:
    """Return a shard's values in a checkpoint, in new memory; in any thread.

    Raises MismatchError if the checkpoint has other names, shapes, dtypes, rules or tables, CheckpointDamaged as
    `reader`.
    """
    kinds = [part["kind"] for part in reader.manifest.parts]
    if kinds != [KIND]:
        raise MismatchError(f"{reader.folder} has {', '.join(kinds)}: expected a checkpoint of `ps.save`")
    tensors = described(reader.manifest.parts[0]["state"])
    names = {name for _, name, _ in known}
    if names != tensors.keys():
        for text, missing in (("has no", names - tensors.keys()), ("has a", tensors.keys() - names)):
            if missing:
                names_of_both = f"expected {_listed(names)}, as passed to init(); the checkpoint has {_listed(tensors)}"
                raise MismatchError(f"{reader.folder} {text} {min(missing)!r}: {names_of_both}")
    said = tensors[shard.name]["map"]
    table = shard if isinstance(shard, TableShard) else None
    _check(reader, f"the table {shard.name!r}", said["table"], table and str(table.spec))
    if table is not None:
        store = RowStore(table.spec)
        with torch.inference_mode(False), torch.no_grad():
            for rows in said["rows"]:
                store.load_state_dict(decode(rows, reader.tensor), table.mine)
        return Restored(said["version"], shard.memory.data, store=store, marks=said["marks"]["map"])
    entry = reader.pieces(_NAME + shard.name)[0]
    _check(reader, f"{shard.name!r}, is it an object:", said["object"], shard.replaces)
    _check(reader, f"dtype of {shard.name!r}", dtype_name(DTYPES[entry.dtype]), dtype_name(shard.memory.data.dtype))
    if not shard.replaces:
        _check(reader, f"shape of {shard.name!r}", list(entry.shape), list(shard.shape))
    numel = prod(entry.shape) if shard.replaces else shard.memory.data.numel()
    data = context.pool.take(numel * shard.memory.data.itemsize).view(shard.memory.data.dtype)
    with torch.inference_mode(False), torch.no_grad():
        data.copy_(reader.part(_NAME + shard.name, shard.start, numel))

    def block(name: str) -> Tensor:
        return reader.part(name, shard.start, numel) if reader.pieces(name)[0].shape else reader.tensor(name)

    restored = Restored(said["version"], data, marks=said["marks"]["map"])
    for key, of_rule in said["states"]["map"].items():
        number = int(key)
        name, state = of_rule["tuple"]
        rule = context.rules[number] if number < len(context.rules) else None
        _check(reader, f"rule number {number}, with a state for {shard.name!r},", name, rule and rule.name)
        assert rule is not None
        restored.states[number] = made = rule.state(data)
        rule.load_state_dict(made, decode(state, block))
    return restored


def moved(shard: Shard, context: Context, uids: Sequence[str]) -> Restored:
    """Return the values of a shard of the last communicator, whose clients were `uids`, for the same block here."""
    marks = {uids[client]: number for client, number in shard.marks.items()}
    if isinstance(shard, TableShard):
        return Restored(shard.version, shard.memory.data, store=shard.store, marks=marks)
    restored = shard.memory.copied(context, shard.version)
    restored.marks = marks
    return restored


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    return f"{', '.join(map(repr, found[:8]))}{', ...' if len(found) > 8 else ''}" if found else "nothing"


def _check(reader: Reader, what: str, seen: object, expected: object) -> None:
    if seen != expected:
        raise MismatchError(f"{reader.folder}: {what} is {seen}: expected {expected}")
