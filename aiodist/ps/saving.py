"""Checkpoints of a parameter server, taken and given back while pushes go on.

A rank asks the first server, which does one after the other. To save, the leader of each tensor puts an order between
two steps, at which every shard copies itself; then each rank writes its file, and the first server the manifest. To
load, all ranks read and compare first; then an order has every shard take the memory that was read for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aiodist.checkpoints import folders
from aiodist.checkpoints.format import FileFacts, TensorEntry, commit, lay_out, write_file
from aiodist.checkpoints.reading import Reader, of_all
from aiodist.errors import CheckpointDamaged
from aiodist.handles.kernel import Program, run, transfer, transfers
from aiodist.ps.answers import Freed, Restored
from aiodist.ps.captured import KIND, Captured, capture, described, moved, restore, tensors_in
from aiodist.ps.context import Service
from aiodist.ps.wire import Order, OrderKind

if TYPE_CHECKING:
    from torch import Tensor

    from aiodist.ps.answers import Answers
    from aiodist.ps.client import Client
    from aiodist.ps.context import Context
    from aiodist.ps.shard import Shard, Shards

_Said = dict[str, Any]
_Tensors = list[tuple[int, str, list[tuple[int, int, int]]]]
"""Of each tensor its key, its name and its spans, as JSON."""


@dataclass(eq=False)
class _Turn:
    """One save or load on this rank; all know it by the number that the first server has given it."""

    captured: dict[int, Captured] = field(default_factory=dict)
    """Of a save, by key."""
    restored: dict[int, Restored] = field(default_factory=dict)
    """Of a load, by key."""
    residuals: list[tuple[int, Sequence[tuple[int, int, int]], Tensor]] = field(default_factory=list)
    """Of a load: the key and the spans of a tensor, and what this worker has left out of it."""
    keys: dict[int, str] = field(default_factory=dict)
    """The shards of this server that are meant, with their names."""
    come: set[int] = field(default_factory=set)
    """Those that have come to the order."""
    error: BaseException | None = None
    then: Callable[[BaseException | None], object] | None = None
    """Called once all have come, or one never will."""


class ServerSaving:
    """One rank's part; every method runs with the transport lock held, unless it says otherwise."""

    def __init__(self, context: Context, answers: Answers, shards: Shards, client: Client) -> None:
        self._context = context
        self._answers = answers
        self._shards = shards
        self._client = client
        self._files = Service(context.progress, f"aiodist-ps-files-{context.name}", lambda: context.coalescer.flush())
        self._turns: dict[int, _Turn] = {}
        self.before: dict[str, Shard] = {}
        """What this rank had, by name, over the communicator before; there `uids_before` were the names of clients."""
        self.uids_before: Sequence[str] = ()
        self._asked: deque[Callable[[], Program[None]]] = deque()
        self.calls: dict[str, Callable[[int, _Said], object]] = {
            "save": partial(self._queue, self._saving),
            "load": partial(self._queue, self._loading),
            "led": lambda client, call: self._answers.answer(
                client, call["n"], tensors=[(shard.key, shard.name, shard.spans) for shard in self._shards.led()]
            ),
            "write": partial(self._begin, self._write),
            "read": partial(self._begin, self._read),
            "take": partial(self._begin, self._take),
            "end_turn": lambda _, call: self._turns.pop(call["turn"], None),
            "saved": self._saved,
        }

    def close(self) -> None:
        self._files.close()

    async def _answering(self, what: Callable[[_Said], Program[_Said]], client: int, call: _Said) -> None:
        """Answer a call with what its program returns, or with why it failed."""
        try:
            self._answers.answer(client, call["n"], **(await what(call)))
        except Exception as error:  # noqa: BLE001  - it belongs to the rank that asked
            self._answers.fail(client, call["n"], error)

    def _begin(self, what: Callable[[_Said], Program[_Said]], client: int, call: _Said) -> None:
        run(self._answering(what, client, call), lambda *_: None)

    async def _on_disk(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return what `work` does in the thread for files."""
        found: list[Any] = []
        await transfer(self._files.run, lambda: found.append(work()))
        return found[0]

    # --- the first server: one after the other ------------------------------------------------------------------------

    def _queue(self, what: Callable[[_Said], Program[_Said]], client: int, call: _Said) -> None:
        self._asked.append(partial(self._answering, what, client, call))
        if len(self._asked) == 1:
            self._next()

    def _next(self) -> None:
        def finish(_: object, error: BaseException | None) -> None:
            self._asked.popleft()
            self._context.coalescer.flush()
            if self._asked:
                self._next()

        run(self._asked[0](), finish)

    async def _ask(self, ranks: Sequence[int], op: str, **said: Any) -> list[_Said]:  # noqa: ANN401
        """Ask ranks; return what each answers. Each is told too where it is among them."""
        answers: list[list[_Said]] = [[] for _ in ranks]
        await transfers(
            [
                self._client.asking(rank, answers[at], op, at=at, size=len(ranks), **said)
                for at, rank in enumerate(ranks)
            ]
        )
        return [answer[0] for answer in answers]

    def _ranks(self) -> list[int]:
        """Return who has anything: servers, and workers where codes leave residuals."""
        workers = self._context.workers if self._context.codec is not None else ()
        return sorted({*self._context.servers, *(rank for rank in workers if rank not in self._context.gone)})

    async def _new_turn(self) -> tuple[int, _Tensors]:
        """Return the number of a turn, and all tensors that there are."""
        led = await self._ask(self._context.servers, "led")
        return self._client.queue.number(), [tensor for each in led for tensor in each["tensors"]]

    def _end(self, turn: int) -> None:
        for rank in self._ranks():
            self._client.say(rank, {"op": "end_turn", "turn": turn})

    async def _saving(self, call: _Said) -> _Said:
        path = Path(call["path"])
        number = await self._on_disk(partial(folders.begin, path))
        turn, tensors = await self._new_turn()
        ranks, folder = self._ranks(), str(folders.folder_of(path, number, ".part"))
        try:
            found = await self._ask(ranks, "write", turn=turn, folder=folder, tensors=tensors)
            written = [
                (FileFacts(*each["facts"]), [TensorEntry(*row) for row in each["entries"]], {"map": {"rank": rank}})
                for each, rank in zip(found, ranks, strict=True)
            ]
            parts = [{"kind": KIND, "state": tensors_in([each["said"] for each in found])}]
            folder = await self._on_disk(partial(commit, path, number, written, parts, None))
            self._tell_saved(folder, {n: of["map"]["marks"]["map"] for n, of in described(parts[0]["state"]).items()})
            if call["keep"] is not None:
                await self._on_disk(partial(folders.remove_old, path, call["keep"]))
        except BaseException:
            await self._on_disk(partial(folders.discard, path, number))
            raise
        finally:
            self._end(turn)
        return {"folder": str(folder)}

    def _tell_saved(self, folder: str, marks: dict[str, dict[str, int]] | None) -> None:
        """Have all ranks know the last checkpoint, with each tensor's marks; None: what was pushed since is void."""
        for rank in range(len(self._context.world_ranks)):
            self._client.say(rank, {"op": "saved", "folder": str(folder), "marks": marks})

    def _saved(self, client: int, call: _Said) -> None:
        count, _ = self._context.saved or (0, "")
        self._context.saved = (count + 1, call["folder"])
        log, uid = self._context.log, self._context.uids[self._context.rank]
        if log is not None and call["marks"] is None:
            log.clear()
        elif log is not None:
            log.saved({name: marks.get(uid, 0) for name, marks in call["marks"].items()})

    async def _loading(self, call: _Said) -> _Said:
        damages: list[str] = []
        if call["path"] is None:  # what servers had over the communicator before
            candidates = [None]
        else:
            path = Path(call["path"])
            if call["again"] and not await self._on_disk(path.exists):  # replaced by a newer one
                path = path.parent
            candidates = await self._on_disk(partial(folders.candidates, path))
            if call["again"]:  # what is older lacks pushes that nobody has any more
                candidates = candidates[:1]
        for folder in candidates:
            turn, tensors = await self._new_turn()
            try:
                said = {"turn": turn, "folder": folder and str(folder), "residuals": not call["again"]}
                await self._ask(self._ranks(), "read", tensors=tensors, **said)
                await self._ask(self._ranks(), "take", **said)
            except CheckpointDamaged as error:
                damages.append(str(error))
            else:
                if not call["again"]:
                    self._tell_saved(str(folder), None)
                return {"folder": str(folder)}
            finally:
                self._end(turn)
        raise of_all(damages)

    # --- every server -------------------------------------------------------------------------------------------------

    def _order(self, kind: OrderKind, number: int, then: Callable[[BaseException | None], None]) -> None:
        """Order this of the tensors that are led here; then wait until all shards that are meant have come to it."""
        turn = self._turns[number]
        turn.then = then
        for shard in self._shards.led():
            if shard.key in turn.keys:
                restored = turn.restored.get(shard.key)
                shard.turn(kind, number, 0 if restored is None else restored.version)
        self._go_on(turn)

    def at(self, shard: Shard, order: Order) -> None:
        """A shard has come to the order of a save or a load."""
        turn = self._turns.setdefault(order.version, _Turn())

        def over(error: BaseException | None) -> None:
            turn.error = turn.error or error
            turn.come.add(shard.key)
            self._go_on(turn)

        if order.kind == OrderKind.SAVE:
            shard.work(lambda: turn.captured.update({shard.key: capture(shard, self._context)}), over)
        else:
            shard.take(turn.restored.pop(shard.key))
            over(None)

    def check(self) -> None:
        for turn in list(self._turns.values()):
            self._go_on(turn)

    def _go_on(self, turn: _Turn) -> None:
        if turn.then is None:
            return
        for key, name in turn.keys.items():
            if key not in turn.come:
                shard = self._shards.get(key)
                if shard is not None and shard.refusal is None:
                    return  # it comes
                turn.error = turn.error or (Freed(f"{name!r} was freed") if shard is None else shard.refusal)
        then, turn.then = turn.then, None
        then(turn.error)

    async def _write(self, call: _Said) -> _Said:
        """Copy what this rank has, shards between two steps, and write its file."""
        turn = self._turns.setdefault(call["turn"], _Turn())
        rank = self._context.rank
        turn.keys = {key: name for key, name, spans in call["tensors"] if any(rank == span[0] for span in spans)}
        residuals = Captured({})

        def copy_residuals() -> None:
            for key, name, spans in call["tensors"]:
                if (whole := self._client.codes.residual(key, spans)) is not None:
                    residuals.add(self._residual_name(name), whole)

        try:
            await transfer(self._order, OrderKind.SAVE, call["turn"])
            await transfer(self._context.service.run, copy_residuals)  # behind what is being encoded
            captured, computing = [*turn.captured.values(), residuals], self._context.progress.computing
            written: _Said = await self._on_disk(partial(_written, call, captured, computing))
        finally:
            for one in turn.captured.values():
                one.release()
        return written

    def _residual_name(self, name: str) -> str:
        return f"rank{self._context.rank}/residuals/{name}"

    async def _read(self, call: _Said) -> _Said:
        turn = self._turns[call["turn"]] = _Turn()
        shards = [self._shards[key] for key, *_ in call["tensors"] if key in self._shards]
        turn.keys = {shard.key: shard.name for shard in shards}

        def read() -> None:
            with Reader(Path(call["folder"])) as reader:
                turn.restored = {shard.key: restore(shard, reader, call["tensors"], self._context) for shard in shards}
                turn.residuals = [
                    (key, spans, reader.tensor(kept))
                    for key, name, spans in call["tensors"]
                    if (kept := self._residual_name(name)) in reader.manifest.tensors
                ]
                reader.check_rest(call["at"], call["size"])

        def move() -> None:
            turn.restored = {s.key: moved(self.before[s.name], self._context, self.uids_before) for s in shards}

        await self._on_disk(move if call["folder"] is None else read)
        return {}

    async def _take(self, call: _Said) -> _Said:
        for residual in self._turns[call["turn"]].residuals if call["residuals"] else ():
            self._client.codes.take(*residual)
        await transfer(self._order, OrderKind.LOAD, call["turn"])
        return {}


def _written(call: _Said, captured: Sequence[Captured], computing: set[int]) -> _Said:
    """Write this rank's file; return what the manifest says of it. In the thread for files."""
    found = [(each, one) for one in captured for each in one.written]
    found.sort(key=lambda each: -each[0].entry.itemsize)
    layout = lay_out([each.entry for each, _ in found])
    left = Counter(id(one) for _, one in found)

    def over(number: int) -> None:
        _, one = found[number]
        left[id(one)] -= 1
        if not left[id(one)]:
            one.release()

    file = Path(call["folder"]) / folders.file_name(call["at"])
    sources = [each.elements.view(torch.uint8) for each, _ in found]
    facts, entries = write_file(file, layout, sources, computing, over)
    return {
        "facts": [facts.nbytes, facts.header, facts.crc],
        "entries": [[e.name, e.dtype, e.shape, e.start, e.numel, e.offset, e.crc] for e in entries],
        "said": [one.said for one in captured if one.said],
    }
