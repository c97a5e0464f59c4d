"""A server's part of checkpoints, which are taken and restored while pushes continue.

The first server does one save or load after the other. For a save, the leader of each tensor puts an order between two
steps, at which every shard captures its values. Each rank writes its file, and the first server the manifest. For a
load, all ranks read and compare first. At the next order every shard takes the memory that was read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiodist.checkpoints import folders
from aiodist.checkpoints.format import commit
from aiodist.checkpoints.reading import Reader, of_all
from aiodist.errors import CheckpointDamaged
from aiodist.handles.kernel import Program, run, transfer, transfers
from aiodist.ps.answers import Freed, Restored
from aiodist.ps.captured import KIND, Captured, Tensors, capture, described, moved, restore, tensors_in, write
from aiodist.ps.service import Service
from aiodist.ps.wire import Order, OrderKind

if TYPE_CHECKING:
    from torch import Tensor

    from aiodist.ps.answers import Answers
    from aiodist.ps.client import Client
    from aiodist.ps.context import Context
    from aiodist.ps.shard import Shard, Shards

_Said = dict[str, Any]
_Work = Callable[[_Said], Program[_Said]]


@dataclass(eq=False)
class _Turn:
    """One save or load on this rank. All ranks know its number, which the first server chooses."""

    captured: dict[int, Captured] = field(default_factory=dict)
    """Shards of a save, by key."""
    restored: dict[int, Restored] = field(default_factory=dict)
    """Shards of a load, by key."""
    residuals: list[tuple[int, Sequence[tuple[int, int, int]], Tensor]] = field(default_factory=list)
    """Key, spans and residual of each tensor, for a load on a worker."""
    keys: dict[int, str] = field(default_factory=dict)
    """Names of this server's shards that take part, by key."""
    reached: set[int] = field(default_factory=set)
    """Keys of shards that have reached the order."""
    error: BaseException | None = None
    done: Callable[[BaseException | None], object] | None = None
    """Called when every shard has reached the order, or one of them never will."""


class ServerSaving:
    """One rank's part; every method runs with the transport lock held, unless its docstring names a thread."""

    def __init__(self, context: Context, answers: Answers, shards: Shards, client: Client) -> None:
        self._context = context
        self._answers = answers
        self._shards = shards
        self._client = client
        self._files = Service(context.progress, f"aiodist-ps-files-{context.name}", context.coalescer.flush)
        self._turns: dict[int, _Turn] = {}
        self._before: Mapping[str, Shard] = {}
        self._uids_before: Sequence[str] = ()
        self._asked: deque[tuple[_Work, int, _Said]] = deque()
        """Saves and loads that the first server has not finished."""
        self.calls: dict[str, Callable[[int, _Said], object]] = {
            "save": partial(self._queue, self._save),
            "load": partial(self._queue, self._load),
            "led": self._led,
            "write": partial(self._begin, self._write),
            "read": partial(self._begin, self._read),
            "take": partial(self._begin, self._take),
            "end_turn": lambda _, call: self._turns.pop(call["turn"], None),
            "saved": self._saved,
        }

    def keep(self, shards: Mapping[str, Shard], uids: Sequence[str]) -> None:
        """Keep this rank's shards of the last communicator, by name, and its clients' uids, for a load of them."""
        self._before, self._uids_before = shards, uids

    def close(self) -> None:
        self._files.close()

    async def _answer(self, what: _Work, client: int, call: _Said) -> None:
        """Answer a call with the result of its program, or with the error."""
        try:
            self._answers.answer(client, call["n"], **(await what(call)))
        except Exception as error:  # noqa: BLE001  - it belongs to the rank that asked
            self._answers.fail(client, call["n"], error)

    def _begin(self, what: _Work, client: int, call: _Said) -> None:
        run(self._answer(what, client, call), lambda *_: None)

    async def _on_disk(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return the result of `work`, which runs in the thread for files."""
        found: list[Any] = []
        await transfer(self._files.run, lambda: found.append(work()))
        return found[0]

    # --- the first server --------------------------------------------------------------------------------------

    def _queue(self, what: _Work, client: int, call: _Said) -> None:
        self._asked.append((what, client, call))
        if len(self._asked) == 1:
            run(self._one_by_one())

    async def _one_by_one(self) -> None:
        while self._asked:
            await self._answer(*self._asked[0])
            self._asked.popleft()
            self._context.coalescer.flush()

    async def _save(self, call: _Said) -> _Said:
        path = Path(call["path"])
        number = await self._on_disk(partial(folders.begin, path))
        turn, tensors = await self._new_turn()
        ranks, folder = self._ranks(), str(folders.folder_of(path, number, ".part"))
        try:
            found = await self._ask(ranks, "write", turn=turn, folder=folder, tensors=tensors)
            written = [(*of["file"], {"map": {"rank": rank}}) for of, rank in zip(found, ranks, strict=True)]
            parts = [{"kind": KIND, "state": tensors_in([each["said"] for each in found])}]
            folder = await self._on_disk(partial(commit, path, number, written, parts, None))
            self._say_saved(folder, {n: of["map"]["marks"]["map"] for n, of in described(parts[0]["state"]).items()})
            if call["keep"] is not None:
                await self._on_disk(partial(folders.remove_old, path, call["keep"]))
        except BaseException:
            await self._on_disk(partial(folders.discard, path, number))
            raise
        finally:
            self._end(turn)
        return {"folder": str(folder)}

    async def _load(self, call: _Said) -> _Said:
        """Restore the newest sound checkpoint in a folder.

        With `again`, servers restart from their last checkpoint: an older one lacks pushes that no log has any more.
        Without a path they take their shards of the last communicator.
        """
        damages: list[str] = []
        if call["path"] is None:
            candidates = [None]
        else:
            path = Path(call["path"])
            if call["again"] and not await self._on_disk(path.exists):  # replaced by a newer one
                path = path.parent
            candidates = await self._on_disk(partial(folders.candidates, path))
            if call["again"]:
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
                    self._say_saved(str(folder), None)
                return {"folder": str(folder)}
            finally:
                self._end(turn)
        raise of_all(damages)

    async def _new_turn(self) -> tuple[int, Tensors]:
        """Return the number of a new turn, and all tensors of the parameter server."""
        led = await self._ask(self._context.servers, "led")
        return next(self._client.queue.numbers), [tensor for each in led for tensor in each["tensors"]]

    def _end(self, turn: int) -> None:
        for rank in self._ranks():
            self._client.say(rank, {"op": "end_turn", "turn": turn})

    async def _ask(self, ranks: Sequence[int], op: str, **said: Any) -> list[_Said]:  # noqa: ANN401
        """Ask ranks, with the place of each among them, and return their answers."""
        answers: list[list[_Said]] = [[] for _ in ranks]
        await transfers(
            [
                self._client.asking(rank, answers[at], op, at=at, size=len(ranks), **said)
                for at, rank in enumerate(ranks)
            ]
        )
        return [answer[0] for answer in answers]

    def _ranks(self) -> list[int]:
        """Return the ranks with a file: servers, and workers if codes leave residuals."""
        workers = self._context.workers if self._context.codec is not None else ()
        return sorted({*self._context.servers, *(rank for rank in workers if rank not in self._context.gone)})

    def _say_saved(self, folder: str, marks: dict[str, dict[str, int]] | None) -> None:
        """Report a checkpoint to all ranks, with each tensor's marks; after a load without: logged pushes are void."""
        for rank in range(self._context.size):
            self._client.say(rank, {"op": "saved", "folder": str(folder), "marks": marks})

    # --- every rank ----------------------------------------------------------------------------------------------

    def _led(self, client: int, call: _Said) -> None:
        led = [(shard.key, shard.name, shard.spans) for shard in self._shards.led()]
        self._answers.answer(client, call["n"], tensors=led)

    def _saved(self, client: int, call: _Said) -> None:
        count, _ = self._context.saved or (0, "")
        self._context.saved = (count + 1, call["folder"])
        log, uid = self._context.log, self._context.uids[self._context.rank]
        if log is not None and call["marks"] is None:
            log.clear()
        elif log is not None:
            log.saved({name: marks.get(uid, 0) for name, marks in call["marks"].items()})

    async def _write(self, call: _Said) -> _Said:
        """Capture this rank's shards, each between two steps, and its residuals, and write the file."""
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
            await transfer(self._context.service.run, copy_residuals)  # after codes in flight
            captured, computing = [*turn.captured.values(), residuals], self._context.progress.computing
            file = Path(call["folder"]) / folders.file_name(call["at"])
            written: _Said = await self._on_disk(partial(write, file, captured, computing))
        finally:
            for one in turn.captured.values():
                one.release()
        return written

    async def _read(self, call: _Said) -> _Said:
        """Read this rank's blocks and residuals, and its share of all other bytes; change nothing."""
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
            turn.restored = {s.key: moved(self._before[s.name], self._context, self._uids_before) for s in shards}

        await self._on_disk(move if call["folder"] is None else read)
        return {}

    async def _take(self, call: _Said) -> _Said:
        """Let shards and codes take the values that `_read` has read."""
        for residual in self._turns[call["turn"]].residuals if call["residuals"] else ():
            self._client.codes.take(*residual)
        await transfer(self._order, OrderKind.LOAD, call["turn"])
        return {}

    def _residual_name(self, name: str) -> str:
        return f"rank{self._context.rank}/residuals/{name}"

    # --- the order of a turn ---------------------------------------------------------------------------------------

    def _order(self, kind: OrderKind, number: int, done: Callable[[BaseException | None], None]) -> None:
        """Send the order to the shards of the tensors that this server leads, and call `done` when all reached it."""
        turn = self._turns[number]
        turn.done = done
        for shard in self._shards.led():
            if shard.key in turn.keys:
                restored = turn.restored.get(shard.key)
                shard.turn(kind, number, 0 if restored is None else restored.version)
        self._check(turn)

    def at(self, shard: Shard, order: Order) -> None:
        """Capture or replace the values of a shard that has reached the order of a save or a load."""
        turn = self._turns.setdefault(order.version, _Turn())

        def reached(error: BaseException | None) -> None:
            turn.error = turn.error or error
            turn.reached.add(shard.key)
            self._check(turn)

        if order.kind == OrderKind.SAVE:
            shard.work(lambda: turn.captured.update({shard.key: capture(shard, self._context)}), reached)
        else:
            shard.take(turn.restored.pop(shard.key))
            reached(None)

    def late(self) -> dict[int, str]:
        """Return the servers whose order a save or a load waits for, each with a tensor (any thread)."""
        waiting = [turn for turn in list(self._turns.values()) if turn.done is not None]
        shards = [self._shards.get(key) for turn in waiting for key in turn.keys if key not in turn.reached]
        return {shard.servers[0]: f"order for {shard.name!r}" for shard in shards if shard is not None}

    def check(self) -> None:
        """End turns that wait for a shard that was freed or refuses its orders."""
        for turn in list(self._turns.values()):
            self._check(turn)

    def _check(self, turn: _Turn) -> None:
        if turn.done is None:
            return
        for key, name in turn.keys.items():
            shard = self._shards.get(key)
            if key in turn.reached:
                continue
            if shard is not None and shard.refusal is None:
                return
            turn.error = turn.error or (Freed(f"{name!r} was freed") if shard is None else shard.refusal)
        done, turn.done = turn.done, None
        done(turn.error)
