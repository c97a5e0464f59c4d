"""What a checkpoint has of shards and of residuals: on the way to a file, and memory that was read from one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.checkpoints.format import DTYPES, TensorEntry
from aiodist.checkpoints.format import dtype_name as name_in_files
from aiodist.checkpoints.kinds import UNKNOWN
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
"""What files call the values of tensors, with their names behind."""
_Tensors = Sequence[tuple[int, str, Sequence[tuple[int, int, int]]]]


@dataclass
class Captured:
    """A shard as it was at one version: what the manifest says of it, values as JSON, and what its file has."""

    said: dict[str, Json]
    written: list[Written] = field(default_factory=list)
    over: Callable[[], object] | None = None
    """Called, once, when nobody looks any more at memory that is lent."""

    def release(self) -> None:
        over, self.over = self.over, None
        if over is not None:
            over()

    def add(self, name: str, t: Tensor, shape: tuple[int, ...] | None = None, start: int = 0) -> None:
        """Have the elements of a tensor written that begin at `start`; without a shape it is whole."""
        entry = TensorEntry(
            name, name_in_files(t.dtype, name), tuple(t.shape) if shape is None else shape, start, t.numel()
        )
        self.written.append(Written(entry, t.reshape(-1)))


def capture(shard: Shard, context: Context) -> Captured:
    """Return what a shard has, lent or else in copies; nothing changes it meanwhile. In any thread."""
    leads = shard.machine is not None
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
    shape = (shard.data.numel(),) if shard.replaces else shard.shape
    captured.over = shard.lend()
    copied: Callable[[Tensor], Tensor] = Tensor.clone if captured.over is None else Tensor.detach
    captured.add(_NAME + shard.name, copied(shard.data), shape, shard.start)
    for number, rule in enumerate(context.rules):
        state = shard.state_of(rule)
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


def tensors_in(said: Iterable[Sequence[dict[str, Json]]]) -> Json:
    """Return the value by which a manifest describes all tensors, of what ranks said of their shards."""
    tensors: dict[str, dict[str, Json]] = {}
    rows: dict[str, list[Json]] = {}
    for one in (one for each in said for one in each):
        rows.setdefault(one["name"], []).extend(one["rows"])
        if one["leads"]:
            tensors[one["name"]] = one
    described = {
        name: {
            "map": {key: one[key] for key in ("version", "object", "table", "marks")}
            | {"states": {"map": one["states"]}, "rows": rows[name]}
        }
        for name, one in tensors.items()
    }
    return {"map": {"tensors": {"map": described}}}


def described(state: Json) -> dict[str, Json]:
    found: dict[str, Json] = state["map"]["tensors"]["map"]
    return found


def restore(shard: Shard, reader: Reader, known: _Tensors, context: Context) -> Restored:
    """Return what a checkpoint has for a shard, in memory of its own. In any thread.

    Raises MismatchError where names or what they mean are not those of the shards, CheckpointDamaged as `reader`.
    """
    kinds = [part.get("kind", UNKNOWN) for part in reader.manifest.parts]
    if kinds not in ([KIND], [UNKNOWN]):
        raise MismatchError(f"{reader.folder} has {', '.join(kinds)}: expected a checkpoint of `ps.save`")
    tensors = described(reader.manifest.parts[0]["state"])
    names = {name for _, name, _ in known}
    if names != tensors.keys():
        for text, missing in (("has no", names - tensors.keys()), ("has a", tensors.keys() - names)):
            if missing:
                told = f"expected {_listed(names)}, which ranks have init()ed; it has {_listed(tensors)}"
                raise MismatchError(f"{reader.folder} {text} {min(missing)!r}: {told}")
    said = tensors[shard.name]["map"]
    table = shard if isinstance(shard, TableShard) else None
    _check(reader, f"the table {shard.name!r}", said["table"], table and str(table.spec))
    if table is not None:
        store = RowStore(table.spec)
        with torch.inference_mode(False), torch.no_grad():
            for rows in said["rows"]:
                store.load_state_dict(decode(rows, reader.tensor), table.mine)
        return Restored(said["version"], shard.data, store=store, marks=said["marks"]["map"])
    entry = reader.pieces(_NAME + shard.name)[0]
    _check(reader, f"{shard.name!r}, is it an object:", said["object"], shard.replaces)
    _check(reader, f"dtype of {shard.name!r}", dtype_name(DTYPES[entry.dtype]), dtype_name(shard.data.dtype))
    if not shard.replaces:
        _check(reader, f"shape of {shard.name!r}", list(entry.shape), list(shard.shape))
    numel = prod(entry.shape) if shard.replaces else shard.data.numel()
    data = context.pool.take(numel * shard.data.itemsize).view(shard.data.dtype)
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
    """Return what a shard of another communicator has, where clients were `uids`, for one with the same block here."""
    marks = {uids[client]: number for client, number in shard.marks.items()}
    if isinstance(shard, TableShard):
        return Restored(shard.version, shard.data, store=shard.store, marks=marks)
    restored = shard.copied(context)
    restored.marks = marks
    return restored


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    return f"{', '.join(map(repr, found[:8]))}{', ...' if len(found) > 8 else ''}" if found else "nothing"


def _check(reader: Reader, what: str, seen: object, expected: object) -> None:
    if seen != expected:
        raise MismatchError(f"{reader.folder}: {what} is {seen}: expected {expected}")
