"""`ParameterServer`: tensors that live on servers, pushed to and pulled from by handles."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from aiodist.backends.inplace import flat
from aiodist.checkpoints.saving import check_keep
from aiodist.codecs import Codec
from aiodist.collectives.program import Program
from aiodist.communicator import Communicator
from aiodist.communicator.claims import Claim, acquire, reading, writing
from aiodist.handles import Handle, join
from aiodist.handles.calls import located
from aiodist.ps.context import ParameterServerStatistics
from aiodist.ps.embedding import BackwardPushes
from aiodist.ps.names import NameEntry, Pushed, check_apart, check_version, named, outs_of, pushed_of
from aiodist.ps.naming import Naming
from aiodist.ps.rebinding import join as joined
from aiodist.ps.requests import Operation, PullPart
from aiodist.ps.session import ParameterServerSession
from aiodist.ps.settings import (
    READS,
    STARTS,
    Asynchronous,
    Policy,
    ReadMode,
    RuleLike,
    Settings,
    Start,
    one_of,
    roles_of,
    rules_of,
)
from aiodist.ps.wire import Reads
from aiodist.types import renamed


class ParameterServer(Naming):
    """Tensors by name, in shards on servers; every call returns a handle.

    ```python
    async with aiodist.ParameterServer(coll, net, rule=aiodist.ps.SGD(lr=0.1),
                                       consistency=aiodist.ps.Synchronous("mean")) as ps:
        for xb, yb in batches:
            net.zero_grad()
            loss_fn(net(xb), yb).backward()
            await ps.push_pull(net)             # gradients up, parameters down
    ```
    All ranks of `coll` open it, with the same settings, and its traffic has a communicator of its own. *Servers* hold
    the shards, *workers* push and count in the clocks, and a rank that is neither only reads. A tensor of at least
    `split_bytes` is cut in contiguous blocks over all servers; a smaller one lies whole on one.

    Args:
        coll: all its ranks take part.
        tensors: init()ed when it is opened: a module (its parameters by name), a dict, or a list ("0", "1", ...).
            With `start` "root" or "first" every worker and reader has the common values in them then.
        rule: what a server does with a push: a name ("zero", "copy", "add", "axpy", "mul", "min", "max"), a server-side
            optimizer such as `SGD`, `Adam`, or a function `(shard, value) -> None` that changes the flat shard.
        rules: more rules, for `init(rule=)` and `push(rule=)`, by name.
        consistency: which pushes make a version, and who waits for whom: `Asynchronous()`, `Synchronous("mean")`,
            `Bounded(s)`, `Quorum(n, "mean")`. The mean is that of rules which are sums, or copy; mul, min, max and
            functions see each push of a step by itself, in the order of the workers.
        servers: the ranks that hold shards, or how many: then the last so many ranks, which do nothing else. None: as
            `aiodist run --servers` says, else all ranks, each of which works too.
        workers: the ranks that push; None: those that do not serve, or all where all serve.
        start: where first values come from: "root", the first worker's; "first", of the first worker to init;
            "own", each server's block from its own tensor.
        reads: "snapshot", all of a tensor from one version, or "lock-free", what is there just now.
        codec: encodes what is pushed to other ranks; floating tensors only. With error feedback where pushes are summed
            (add, axpy, optimizers, rules that combine): what a code left out goes with the next push, weighted by its
            own `alpha`. Of copy, mul, min, max and functions each push is encoded by itself, so a copy through `TopK`
            has zeros; copy and zero end what this rank had left.
        pull_codec: encodes what is pulled, as the change since this rank's last pull.
        split_bytes: tensors from here on are cut.
        checkpoints: workers keep a copy of what they have pushed until `save` has it, for `rebind` after a server died.
        timeout: seconds, for calls that are given none; None is none.

    Rank r of a server is rank r of `coll`. In the block a server-only rank has nothing to do; leaving it, it waits for
    the workers, as every rank waits for all. An exception in the block gives the parameter server up on all ranks.

    Requests are served whenever this rank's loop runs or waits, and, a millisecond later, while user code holds the
    loop's thread, as long as that code gives the GIL up now and then, as torch's kernels do.

    """

    def __init__(  # noqa: PLR0913  - each is a choice of its own
        self,
        coll: Communicator,
        tensors: object = None,
        *,
        rule: RuleLike = "add",
        rules: Mapping[str, RuleLike] | None = None,
        consistency: Policy | None = None,
        servers: int | Sequence[int] | None = None,
        workers: Sequence[int] | None = None,
        start: Start = "root",
        reads: ReadMode = "snapshot",
        codec: Codec | None = None,
        pull_codec: Codec | None = None,
        split_bytes: int = 1 << 20,
        checkpoints: bool = False,
        timeout: float | None = None,
    ) -> None:
        if isinstance(split_bytes, bool) or not isinstance(split_bytes, int) or split_bytes < 1:
            raise ValueError(f"split_bytes={split_bytes!r}: expected a number of bytes, at least 1")
        serving, working = roles_of(coll, servers, workers)
        settings = Settings(
            rules=rules_of(rule, rules or {}),
            consistency=Asynchronous() if consistency is None else consistency,
            servers=serving,
            workers=working,
            start=one_of("start", start, STARTS),
            codec=codec,
            pull_codec=pull_codec,
            split_bytes=split_bytes,
            checkpoints=checkpoints,
        )
        super().__init__(ParameterServerSession(coll, settings, timeout), one_of("reads", reads, tuple(READS)))
        self._tensors = named(tensors)

    async def __aenter__(self) -> Self:
        await self._session.open(self._begin, partial(joined, self._session))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.exit(error, partial(self._rebind, roles=None))

    # --- who -------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number, that of the communicator which it was made with."""
        return self._session.parent.rank

    @property
    def timeout(self) -> float | None:
        """The time-out of calls that are given none, in seconds; None is none."""
        return self._session.timeout

    @property
    def servers(self) -> tuple[int, ...]:
        """The ranks that hold shards, in order."""
        return self._settings.servers

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that push, in order."""
        return self._settings.workers

    @property
    def is_server(self) -> bool:
        """This rank holds shards."""
        return self.rank in self.servers

    @property
    def is_worker(self) -> bool:
        """This rank pushes, and counts in the clocks."""
        return self.rank in self.workers

    def statistics(self) -> ParameterServerStatistics:
        """Return what happened on this rank since the block was entered; local, at once.

        Raises RuntimeError before the block.
        """
        if not hasattr(self._session, "server"):
            raise RuntimeError("the parameter server is not open: use `async with`")
        return self._session.server.statistics()

    def __repr__(self) -> str:
        return f"<ParameterServer {len(self._names.names)} names, servers {self.servers}, workers {self.workers}>"

    async def _begin(self) -> None:
        """Make known what it was opened with, and take the common values."""
        start = self._settings.start
        if self._tensors:
            await self.init(list(self._tensors), list(self._tensors.values()))
            self._names.first = tuple(self._tensors)
            if start != "own":
                await self.pull()

    # --- pushing and pulling ---------------------------------------------------------------------------------

    def push(
        self,
        what: object = None,
        values: Any = None,  # noqa: ANN401
        *,
        rule: RuleLike | None = None,
        alpha: float = 1.0,
        timeout: float | None = None,
    ) -> Handle[None]:
        """Have servers apply `values` to tensors: by `rule`, else by that of each tensor.

        `what` is None (all that it was opened with), a name, a tensor that was init()ed, a list of these, or a module.
        `values`: a tensor of the shape that was init()ed, a list of tensors, or an object; None: what lies in the
        tensors themselves, or in their `.grad`, where the rule takes gradients. Done when applied on the servers; with
        `Synchronous` and `Quorum` when they have it for its step. Until then it must not be changed, if it has more
        than some 30 KB.

        Raises KeyError for an unknown name, TypeError and ValueError for another dtype, shape or number of values, for
        an unknown rule and on a rank that is no worker; RemoteError on await for what a rule raised on a server,
        PeerLost when the server is gone. Cost: its bytes once over the network; 20 us for small ones, a third of that
        each when many are issued before one `sync`.
        """
        self._session.check()
        pushed = self._pushed(self._names.resolve(what), values, rule, alpha)
        if len(pushed) == 1 and pushed[0].value.nbytes <= self._session.context.coalescer.inline_bytes:
            # What `_call` does, for what is pushed fifty thousand times a second.
            handle = self._session.handle("push", pushed[0].value.nbytes, timeout)
            self._session.client.pushes.push(Operation(handle, 1, ()), *pushed[0], alpha)
        else:
            handle = self._call("push", timeout, (pushed, alpha))
        if self._session.context.coalescer.congested:
            self._session.progress.glance()
        return handle

    def pull(
        self,
        what: object = None,
        out: Any = None,  # noqa: ANN401
        *,
        reads: ReadMode | None = None,
        at_least: int = 0,
        timeout: float | None = None,
    ) -> Handle[Any]:
        """Return the tensors as they are on the servers: in place, in `out`, or for an object a new one.

        `what` as in `push`; the result is one, or a list, and `out` one tensor of the shape that was init()ed, or a
        list. It holds what this rank pushed before. With "snapshot" all of a tensor is of one version, at least
        `at_least`; with "lock-free" it is read while others write. The handle's `version` says which (of a list the
        lowest). Under `Synchronous` it waits for the steps of this rank's pushes.

        Raises KeyError for an unknown name, TypeError and ValueError for another dtype, shape or number of `out`,
        RuntimeError for an `out` that requires grad (in grad mode); PeerLost on await when the server is gone. Cost:
        its bytes once over the network; none within a host, from an arena.
        """
        self._session.check()
        entries, single = self._names.resolve(what)
        outs, version = outs_of(entries, out, single), check_version(at_least)
        mode = READS[one_of("reads", self._read_mode if reads is None else reads, tuple(READS))]
        return self._call("pull", timeout, ([], 1.0), (entries, outs, single), (mode, version))

    def push_pull(
        self,
        what: object = None,
        values: Any = None,  # noqa: ANN401
        out: Any = None,  # noqa: ANN401
        *,
        rule: RuleLike | None = None,
        alpha: float = 1.0,
        timeout: float | None = None,
    ) -> Handle[Any]:
        """Push, and return what the tensors are after that: `push` and `pull` in one; raises and costs what both do.

        A tensor of `out` may be the very tensor that is pushed for the same name. Raises ValueError for any other that
        overlaps a pushed tensor.
        """
        self._session.check()
        entries, single = found = self._names.resolve(what)
        pushed = self._pushed(found, values, rule, alpha)
        pulls = entries, outs_of(entries, out, single), single
        reads = Reads.SNAPSHOT if self._read_mode == "snapshot" else Reads.AFTER_OWN
        return self._call("push_pull", timeout, (pushed, alpha), pulls, (reads, 0))

    def pushing(self, what: object = None, *, alpha: float = 1.0) -> BackwardPushes:
        """Return a block in whose backward passes each gradient is pushed as soon as it is there.

        ```python
        async with ps.pushing(net):
            await asyncio.to_thread(loss.backward)  # or loss.backward(): in any thread
        await ps.pull(net)
        ```
        `what` as in `push`: leaf tensors that require a gradient. Leaving the block waits for the pushes. A gradient
        belongs to its push until then. Raises on leaving what a push raises.
        """
        self._session.check()
        entries, _ = self._names.resolve(what)
        tensors = [entry.tensor for entry in entries if entry.tensor is not None and entry.tensor.requires_grad]
        return BackwardPushes(tensors, lambda t: self.push(t, t.grad, alpha=alpha), self._session.progress)

    def prefetch(self, what: object = None, *, timeout: float | None = None) -> Handle[Any]:
        """Begin to pull into new memory, for the next `integrate`; returns that memory. Raises and costs as `pull`."""
        self._session.check()
        entries, single = self._names.resolve(what)
        outs = [None if entry.tensor is None else torch.empty_like(entry.tensor) for entry in entries]
        names = [entry.name for entry in entries]
        handle = self.pull(names[0] if single else names, outs[0] if single else outs, timeout=timeout)
        handle.op = "prefetch"
        for entry, out in zip(entries, outs, strict=True):
            if out is not None:
                self._prefetched[entry.name] = (handle, out)
        return handle

    def integrate(
        self, fn: Callable[[Tensor, Tensor], object], what: object = None, *, timeout: float | None = None
    ) -> Handle[Any]:
        """Call `fn(mine, theirs)` for each tensor, on the loop, with what was prefetched, or is pulled now.

        Both have the shape that was init()ed; `fn` changes `mine`, the tensor that was given, in place, without
        autograd. Returns the tensors. Raises TypeError for an object, ValueError for a tensor twice, on await what `fn`
        raises. Cost: a `pull` of what was not prefetched.
        """
        self._session.check()
        entries, single = self._names.resolve(what)
        for entry in entries:
            if entry.tensor is None:
                raise TypeError(f"integrate of {entry.name!r}: expected a tensor, not an object")
        if len(set(entries)) != len(entries):
            raise ValueError(f"integrate of {[entry.name for entry in entries]}: expected each of them once")
        missing = [entry for entry in entries if entry.name not in self._prefetched]
        if missing:
            self.prefetch([entry.name for entry in missing], timeout=timeout)
        fetched = [self._prefetched.pop(entry.name) for entry in entries]
        handle = self._session.handle("integrate", 0, timeout)
        tensors = [entry.tensor for entry in entries if entry.tensor is not None]

        def finish(_: object) -> None:
            try:
                with torch.no_grad():
                    for mine, (pull, theirs) in zip(tensors, fetched, strict=True):
                        pull.result()  # raises what made it fail
                        fn(mine, theirs)
            except Exception as error:  # noqa: BLE001  - it belongs to the task that awaits the handle
                handle.reject(error)
                return
            handle.version = min((pull.version for pull, _ in fetched if pull.version is not None), default=None)
            handle.resolve(tensors[0] if single else tensors)

        pulls = {id(pull): pull for pull, _ in fetched}.values()
        one_over = join(len(pulls), finish)
        for pull in pulls:
            pull.add_done_callback(lambda _: one_over(None))
        if not pulls:
            finish(None)
        return handle

    # --- waiting -----------------------------------------------------------------------------------------------

    def sync(self, *, timeout: float | None = None) -> Handle[None]:
        """Be done when the servers have every push that this rank issued before: applied, dropped, or held.

        Held are those that wait for other workers' pushes; a `barrier` waits for these too. Covers push handles that
        nobody awaited. Raises, on await, what made one fail after it was accepted. Cost: nothing is sent.
        """
        self._session.check()
        handle = self._session.handle("sync", 0, timeout)
        self._session.client.pushes.sync(handle, self._session.account)
        return handle

    def barrier(self, *, timeout: float | None = None) -> Handle[None]:
        """Wait for all workers that have not left. After `await push`, then this, every later pull sees the push.

        A worker that waits here is waited for by nobody: steps that lack its pushes are made of what there is. After it
        all go on from the same step, however many each had pushed. Raises ValueError on a rank that is no worker; on
        await PeerLost when the first server is gone, and what made a push fail after it was accepted. Cost: a word to
        each server, and an answer.
        """
        self._session.check()
        self._session.check_worker("barrier()")
        return self._session.run("barrier", self._session.client.meeting(), timeout)

    # --- checkpoints -------------------------------------------------------------------------------------------

    @renamed(keep="keep_last")
    def save(
        self, path: str | os.PathLike[str], *, keep_last: int | None = None, timeout: float | None = None
    ) -> Handle[Path]:
        """Write a checkpoint of all that the servers have, while pushes go on; the result is its own folder in `path`.

        One rank calls it; all ranks must see `path`. Each tensor is as it is between two steps, on all of its shards
        between the same two: its values, what its rules keep beside them, its version; the rows of tables, objects, and
        what the codecs of each worker have left out. The format is that of `aiodist.save`, with a file for each server;
        all of it is on the disk before the folder is renamed. `keep_last` is how many checkpoints are left in `path`,
        None all. Saves and loads are done one after the other.

        Raises ValueError for a wrong `keep_last`; on await RemoteError for what a server raised, such as OSError,
        PeerLost when a server is gone, KeyError when a tensor was freed meanwhile. The checkpoints before are untouched
        then. Cost: on each server a thread that writes; and a copy of each tensor that is pushed to before it is
        written.
        """
        self._session.check()
        check_keep(keep_last)
        asked = self._session.client.call(self.servers[0], "save", path=os.path.abspath(Path(path)), keep=keep_last)
        return self._session.run("save", _folder(asked), timeout)

    def load(self, path: str | os.PathLike[str], *, timeout: float | None = None) -> Handle[Path]:
        """Give the servers the state of a checkpoint, of any number of servers; the result is its folder.

        `path` is a checkpoint's own folder, or one with several: then the newest sound one is taken. One rank calls it,
        when all names are init()ed that were when it was saved; tensors of ranks change when they pull. Every byte is
        compared with its checksum before anything is changed. Worker r goes on with the residuals that worker r had.

        Raises, on await, CheckpointDamaged where none is sound, saying where, MismatchError for other names, shapes,
        dtypes, rules or tables, which says what was seen and expected, RemoteError where there is none; nothing is
        changed then. Cost: each server reads what it needs into new memory, and all together the rest.
        """
        self._session.check()
        asked = self._session.client.call(self.servers[0], "load", path=os.path.abspath(Path(path)), again=False)
        return self._session.run("load", _folder(asked), timeout)

    @located
    async def rebind(
        self, coll: Communicator, *, servers: int | Sequence[int] | None = None, workers: Sequence[int] | None = None
    ) -> None:
        """Go on over another communicator, such as `await coll.shrink()` or `await coll.grow(n)` returns.

        All its ranks take part: those that were there call this, new ones open a `ParameterServer` on it with the same
        settings. `servers` and `workers` are as where it was opened. If not given, and all ranks served, all of `coll`
        do; else who served and is there goes on to, and those work that did, and new ranks.

        If every server is there, in its place, servers keep what they have. Else all of them go on from the last
        checkpoint of `save`, and workers push again what came after it: each push counts once, whether it was awaited
        or its await raised PeerLost or CommunicatorAborted. What was known to be applied is so in the order in which it
        was; of a rank that died the pushes since are lost. This takes `checkpoints=`, without which a push under way
        may be lost: meet at a `barrier` before. What else was under way raises CommunicatorAborted; pull again.

        Raises PeerLost where servers are missing, or their shards are at different versions, and there is no checkpoint
        to go on from; ValueError where no server is left; what `load` raises; MismatchError for other settings.
        """
        await self._rebind(coll, None if servers is None and workers is None else roles_of(coll, servers, workers))

    # --- how it is done ----------------------------------------------------------------------------------------

    def _pushed(
        self,
        what: tuple[list[NameEntry], bool],
        values: Any,  # noqa: ANN401
        rule: RuleLike | None,
        alpha: float,
    ) -> list[Pushed]:
        self._session.check_worker("push")
        return pushed_of(*what, values, None if rule is None else self._settings.rule(rule), alpha)

    def _call(
        self,
        op: str,
        timeout: float | None,
        pushes: tuple[Sequence[Pushed], float],
        pulls: tuple[Sequence[NameEntry], Sequence[Tensor | None], bool] = ((), (), True),
        how: tuple[Reads, int] = (Reads.SNAPSHOT, 0),
    ) -> Handle[Any]:
        """Push with that alpha, then pull into the outs, of one or of several; `how` is what a pull may see."""
        (pushed, alpha), (entries, outs, single), client = pushes, pulls, self._session.client
        into = [None if out is None else flat(out) for out in outs]
        if pushed and outs:
            check_apart(pushed, entries, into)
        moved = [value for _, value, _ in pushed] or [t for t in into if t is not None]
        nbytes = sum([t.nbytes for t in moved])
        handle = self._session.handle(op, nbytes, timeout, depth=4)
        small = self._session.context.coalescer.inline_bytes
        claims: list[Claim] = []
        if outs or nbytes > small:  # small pushes are copied
            claims = writing(*(t for t in into if t is not None and t.nbytes))
            taken = {claim.start for claim in claims}
            claims += [c for c in reading(*(v for _, v, _ in pushed)) if c.nbytes > small and c.start not in taken]
            acquire(claims, handle)

        def result() -> Any:  # noqa: ANN401
            found = [_result(part, out) for part, out in zip(parts, outs, strict=True)]
            return (found[0] if found else None) if single else found

        context = self._session.context
        hosts = [None if t is None else context.host_for(t) for t in into]
        landings = [
            context.landing(host, t)
            for host, t in zip(hosts, into, strict=True)
            if t is not None and host is not None and host is not t
        ]
        operation = Operation(handle, len(pushed) + len(entries), claims, result, landings)
        parts = [_part(operation, entry, t) for entry, t in zip(entries, hosts, strict=True)]
        with client.queue.together():
            for entry, value, number in pushed:
                client.pushes.push(operation, entry, value, number, alpha)
            for part in parts:
                client.pulls.pull(part, *how)
        if not pushed and not parts:
            handle.resolve(result())
        return handle


def _folder(asked: Program[dict[str, Any]]) -> Program[Path]:
    said = yield from asked
    return Path(said["folder"])


def _part(operation: Operation, entry: NameEntry, into: Tensor | None) -> PullPart:
    """Return the pull of one tensor into flat `into`; without it, of an object."""
    if into is None:
        return PullPart(operation, entry, 0)
    blocks = {rank: into[start:stop] for rank, start, stop in entry.spans}
    return PullPart(operation, entry, into.nbytes, blocks.__getitem__)


def _result(part: PullPart, out: Tensor | None) -> Any:  # noqa: ANN401
    """Return what the user gets: the tensor as it was given, or a new object."""
    if part.value is None:
        return out
    assert part.entry.codec is not None
    return part.entry.codec.decode(part.value)
