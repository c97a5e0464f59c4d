"""`ParameterServer`: tensors that live on servers, pushed to and pulled from by handles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from aiodist import env
from aiodist.arguments import check_rank
from aiodist.backends.base import DTYPES
from aiodist.claims import Claim, reading, writing
from aiodist.codecs import Codec, ObjectCodec
from aiodist.collectives.program import Call, Program, concurrently, run
from aiodist.communicator import Communicator
from aiodist.errors import AiodistError, CommunicatorAborted, CommunicatorClosed, MismatchError, PeerLost
from aiodist.handles import Account, Handle, Progress, in_flight
from aiodist.handles.origin import whence
from aiodist.handles.progress import transport_lock
from aiodist.ps.client import Client
from aiodist.ps.consistency import Asynchronous, Policy
from aiodist.ps.context import Context
from aiodist.ps.integration import Integration
from aiodist.ps.known import Known, Names, named
from aiodist.ps.metrics import Metrics
from aiodist.ps.operation import Operation, PullPart
from aiodist.ps.pool import Pool
from aiodist.ps.post import Post
from aiodist.ps.raw import flat
from aiodist.ps.rules import RULES, Rule, as_rule
from aiodist.ps.server import Server
from aiodist.ps.service import Service
from aiodist.ps.sharding import place
from aiodist.ps.wire import Kind, Reads

__all__ = ["ParameterServer"]

Start = Literal["root", "first", "own"]
ReadMode = Literal["snapshot", "lock-free"]
_Out = tuple[Tensor | None, Tensor | None]  # flat, and as it was given
RuleLike = str | Rule | Callable[[Tensor, Tensor], object]

_MISSING: Any = object()
_READS = {"snapshot": Reads.SNAPSHOT, "lock-free": Reads.LOCK_FREE}
_STARTS = ("root", "first", "own")
_SERVER_KINDS = frozenset({Kind.CALL, Kind.PUSH, Kind.PULL, Kind.ORDER, Kind.RELEASE})


class ParameterServer:
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
            optimizer such as `SGD`, `Adam`, or a function `(shard, value) -> None` that changes the flat shard in place.
        rules: more rules, for `init(rule=)` and `push(rule=)`, by name.
        consistency: which pushes make a version, and who waits for whom: `Asynchronous()`, `Synchronous("mean")`,
            `Bounded(s)`, `Quorum(n, "mean")`.
        servers: the ranks that hold shards, or how many: then the last so many ranks, which do nothing else. None: as
            `aiodist run --servers` says, else all ranks, each of which works too.
        workers: the ranks that push; None: those that do not serve, or all where all serve.
        start: where first values come from: "root", the first worker's; "first", of whoever is the first to init;
            "own", each server's block from its own tensor.
        reads: "snapshot", all of a tensor from one version, or "lock-free", whatever is there just now.
        codec: encodes what is pushed, with error feedback; floating tensors only.
        pull_codec: encodes what is pulled, as the change since this rank's last pull.
        split_bytes: tensors from here on are cut.
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
        timeout: float | None = None,
    ) -> None:
        self._parent = coll
        self._tensors = named(tensors)
        self._rules = _rules(rule, rules or {})
        self._policy: Policy = Asynchronous() if consistency is None else consistency
        self.servers, self.workers = _roles(coll, servers, workers)
        self._start = _one_of("start", start, _STARTS)
        self._reads = _READS[_one_of("reads", reads, tuple(_READS))]
        self._codec = codec
        self._pull_codec = pull_codec
        if isinstance(split_bytes, bool) or not isinstance(split_bytes, int) or split_bytes < 1:
            raise ValueError(f"split_bytes={split_bytes!r}: expected a number of bytes, at least 1")
        self._split_bytes = split_bytes
        self.timeout = timeout
        self._names = Names()
        self._prefetched: dict[str, tuple[Handle[Any], Any]] = {}
        self._refusal: AiodistError | RuntimeError | None = RuntimeError(
            "the parameter server is not open: use `async with`"
        )
        self._opened = False
        self._leaving = False

    # --- who -------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number, that of the communicator which it was made with."""
        return self._parent.rank

    @property
    def is_server(self) -> bool:
        """This rank holds shards."""
        return self.rank in self.servers

    @property
    def is_worker(self) -> bool:
        """This rank pushes, and counts in the clocks."""
        return self.rank in self.workers

    @property
    def names(self) -> tuple[str, ...]:
        """What this rank has init()ed."""
        return self._names.names

    def metrics(self) -> Metrics:
        """Return what happened on this rank so far; local, at once, and a copy."""
        self._check_opened()
        return self._server.measured()

    def __repr__(self) -> str:
        return f"<ParameterServer {len(self._names.names)} names, servers {self.servers}, workers {self.workers}>"

    # --- opening and leaving ---------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._opened:
            raise RuntimeError("a parameter server cannot be opened twice: make another")
        self._opened = True
        self._coll = await self._parent.dup()
        await self._agree()
        self._open()
        if self._tensors and (self.is_worker or not self.is_server or self._start == "own"):
            try:
                await self.init(list(self._tensors), list(self._tensors.values()))
                self._names.first = tuple(self._tensors)
                if self._start != "own":
                    await self.pull()
            except BaseException as error:
                self._abandon(error)
                raise
        return self

    async def _agree(self) -> None:
        """Raise MismatchError unless all ranks opened it with the same settings."""
        mine = {
            "rules": repr(self._rules),
            "consistency": repr(self._policy),
            "servers": self.servers,
            "workers": self.workers,
            "start": self._start,
            "codec": repr(self._codec),
            "pull_codec": repr(self._pull_codec),
            "split_bytes": self._split_bytes,
        }
        others = await self._coll.allgather_object(mine)
        for rank, other in enumerate(others):
            different = [what for what in mine if other[what] != others[0][what]]
            if different:
                what = different[0]
                raise MismatchError(
                    f"parameter servers disagree on {what}: rank 0: {others[0][what]}; rank {rank}: {other[what]}"
                )

    def _open(self) -> None:
        progress = self._progress = Progress.current()
        issuer = self._coll._issuer
        near = self._coll._family.near
        self._account = Account(progress.loop)
        self._loop = progress.loop

        def buffer(nbytes: int) -> Tensor:
            with torch.inference_mode(False):
                return self._coll.empty(nbytes, torch.uint8)

        self._context = Context(
            name=self._coll.name,
            rank=self.rank,
            servers=self.servers,
            workers=self.workers,
            world_ranks=issuer.ranks,
            rules=tuple(self._rules.values()),
            policy=self._policy,
            codec=self._codec,
            pull_codec=self._pull_codec,
            progress=progress,
            service=Service(progress, f"aiodist-ps-{self._coll.name}"),
            pool=Pool(buffer),
            near=near,
            metrics=Metrics(),
        )
        self._context.post = Post(self._coll._transport, self._heard, self._failed, self._context.ring)
        self._server = Server(self._context)
        self._client = Client(self._context, self._server.own, self._server.shown)
        issuer.on_lost.append(self._lost)
        issuer.on_abort.append(self._aborted)
        self._coll.admit(self)
        self._refusal = None
        with transport_lock:
            self._context.post.open()
        if issuer.refusal is not None:  # lost in the meantime
            self._aborted(CommunicatorAborted(str(issuer.refusal)))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon(error)
            return
        try:
            await self._leave()
        except BaseException as raised:
            self._abandon(raised)
            raise
        await self._coll.aclose()

    async def _leave(self) -> None:
        """End in order: nothing of mine is open, all servers know that I have left, and all ranks have."""
        if self._refusal is not None:
            raise self._refusal
        self._leaving = True
        try:
            await self._drain()
        finally:
            self._account.judge()
        await self._run("leave", self._goodbye(), None)
        await self._ended()
        self._close(CommunicatorClosed(f"parameter server {self._coll.name!r} is closed", comm=self._coll.name))

    async def _drain(self) -> None:
        """Wait until nothing of this rank's is open."""
        await self.sync(timeout=None)
        pending = [handle for handle in self._prefetched_handles() if not handle.done()]
        for handle in pending:
            await handle
        while self._client.busy:
            await asyncio.sleep(1e-3)

    def _goodbye(self) -> Program[None]:
        post = self._context.post
        living = [rank for rank in self.servers if rank not in self._context.gone]
        for rank in living:
            yield from self._client.call(rank, "leave")
        first = self.servers[0]
        yield from self._client.call(first, "bye")
        others = [rank for rank in range(self._coll.size) if rank != first and rank not in self._context.gone]
        if others and self.rank == others[0]:
            post.say_last(first)

    async def _ended(self) -> None:
        """Wait until nothing is listened for any more; where a rank died the transport is given up anyway."""
        if self._context.gone:
            return
        over = self._loop.create_future()

        def end() -> None:
            self._progress.post(lambda: over.done() or over.set_result(None))

        with transport_lock:
            self._context.post.when_last(end)
        await over

    def _close(self, refusal: AiodistError) -> None:
        self._refusal = self._refusal or refusal
        self._context.post.give_up()
        self._context.service.close()
        issuer = self._coll._issuer
        for told, mine in ((issuer.on_lost, self._lost), (issuer.on_abort, self._aborted)):
            if mine in told:
                told.remove(mine)  # type: ignore[arg-type]

    def _abandon(self, error: BaseException) -> None:
        """End at once, and have the other ranks do so too."""
        if self._refusal is not None and isinstance(self._refusal, CommunicatorClosed):
            return
        self._give_up(CommunicatorAborted(f"the parameter server was given up: {error!r}", rank=self.rank))
        if self._coll._issuer.refusal is None:
            self._coll.abort(f"its parameter server was given up on rank {self.rank}: {error!r}")

    def _give_up(self, error: AiodistError) -> None:
        if self._refusal is not None:
            return
        self._close(error)
        with transport_lock:
            self._client.give_up(error)
        self._account.judge()

    async def release(self) -> None:
        """End with the communicator: for its family."""
        self.give_up()

    def give_up(self) -> None:
        """End without waiting for anything: for its family."""
        name = self._coll.name
        self._give_up(CommunicatorAborted(f"parameter server {name!r} was given up: its communicator ended", comm=name))

    # --- other ranks' fate -----------------------------------------------------------------------------------

    def _lost(self, rank: int, error: AiodistError) -> None:
        if rank < 0:
            self._give_up(error)
            return
        context = self._context
        context.gone[rank] = error
        with transport_lock:
            context.post.forget(rank)
            self._server.lose(rank)
            self._client.lose(rank)
            context.post.flush_all()

    def _aborted(self, error: AiodistError) -> None:
        if not isinstance(error, PeerLost):
            self._give_up(error)

    def _failed(self, rank: int | None, error: BaseException) -> None:
        """A message could not be sent or received: whose fault it is the control channel tells."""
        if rank is not None and rank in self._context.gone:
            return
        if rank is None and not self._context.gone:
            text = f"parameter server {self._coll.name!r} can hear nothing more: {error}"
            self._progress.post(partial(self._give_up, CommunicatorAborted(text)))

    def _heard(self, src: int, kind: int, body: memoryview) -> None:
        try:
            if kind in _SERVER_KINDS:
                self._server.heard(src, kind, body)
            else:
                self._client.heard(src, kind, body)
        except Exception as error:  # noqa: BLE001  - it must not end the progress of everything else
            message = f"parameter server {self._coll.name!r}: what rank {src} sent failed here"
            self._progress.report(message, error)
            self._progress.post(partial(self._abandon, error))

    # --- names -----------------------------------------------------------------------------------------------

    def init(
        self,
        what: str | Sequence[str],
        values: Any = _MISSING,  # noqa: ANN401
        *,
        start: Start | None = None,
        rule: RuleLike | None = None,
        codec: ObjectCodec | None = None,
        timeout: float | None = None,
    ) -> Handle[None]:
        """Make names known: `what` is one with its value, or a list with a list of values.

        Done when the first values lie on the servers; whose they are `start` says, and whoever comes later waits. With
        `codec` (`codecs.Json`, `codecs.Pickle`) the values are Python objects, kept as bytes. What a rank has not
        init()ed it cannot push or pull. Raises KeyError for a name that it has, TypeError for integers under a
        consistency that takes means; on await MismatchError when ranks disagree on dtype, shape, rule or start.
        """
        self._check()
        names = [what] if isinstance(what, str) else list(what)
        given = [values] if isinstance(what, str) else list(values)
        if len(names) != len(given):
            raise ValueError(f"{len(given)} values for {len(names)} names: expected one for each")
        chosen = self._start if start is None else _one_of("start", start, _STARTS)
        fresh = [self._new(name, value, rule, codec) for name, value in zip(names, given, strict=True)]
        programs = [
            self._opening(known, given[i] if codec else known.tensor, chosen) for i, known in enumerate(fresh)
        ]
        return self._run("init", concurrently(programs) if programs else _nothing(), timeout)

    def _new(self, name: str, value: Any, rule: RuleLike | None, codec: ObjectCodec | None) -> Known:  # noqa: ANN401
        if not isinstance(name, str) or not name:
            raise TypeError(f"name {name!r}: expected a str that is not empty")
        if name in self._names:
            raise KeyError(f"{name!r} was init()ed already: free() it first")
        if value is _MISSING:
            raise TypeError(f"init of {name!r}: expected a value, from which readers too learn dtype and shape")
        number, chosen = self._rule("copy" if rule is None and codec is not None else rule)
        if codec is not None:
            if chosen is not RULES["copy"]:
                raise ValueError(f"rule {chosen.name} for the object {name!r}: expected copy, servers look at no object")
            placement = place(name, 1, 1, len(self.servers), 2)
            return Known(name, None, (number, chosen), placement, self.servers, codec)
        t = Known.checked(name, value)
        chosen.check(t.dtype)
        if self._policy.scales and not (t.dtype.is_floating_point or t.dtype.is_complex):
            raise TypeError(f"{name!r} holds {t.dtype}: expected a floating dtype, since {self._policy!r} takes means")
        placement = place(name, t.numel(), t.itemsize, len(self.servers), self._split_bytes)
        return Known(name, t, (number, chosen), placement, self.servers)

    def _opening(self, known: Known, value: Any, start: str) -> Program[None]:  # noqa: ANN401
        leader = known.spans[0].rank
        said = yield from self._client.call(
            leader,
            "open",
            name=known.name,
            dtype=DTYPES.index(known.dtype),
            shape=list(known.shape),
            rule=known.rule_number,
            start=start,
            servers=[span.rank for span in known.spans],
            codec=repr(known.codec),
            worker=self.is_worker,
        )
        known.key = said["key"]
        if said["fill"]:
            data = flat(value) if known.codec is None else known.codec.encode(value)
            spans = known.spans if start != "own" else [span for span in known.spans if span.rank == self.rank]
            if known.codec is not None:
                spans = [spans[0]._replace(stop=data.numel())]
            yield from self._client.filling(known, data, spans)
            yield from self._client.call(leader, "ready", name=known.name)
        self._names.add(known)

    def free(self, what: object, *, timeout: float | None = None) -> Handle[None]:
        """Forget names on this rank, after its own pushes; a name is gone when all workers have freed it."""
        self._check()
        knowns, _ = self._names.resolve(what)
        for known in knowns:
            self._names.remove(known)
            self._prefetched.pop(known.name, None)
        self._names.first = tuple(name for name in self._names.first if name in self._names)
        programs = [self._freeing(known) for known in knowns]
        return self._run("free", concurrently(programs) if programs else _nothing(), timeout)

    def _freeing(self, known: Known) -> Program[None]:
        yield [partial(self._client.when_applied, known)]
        yield from self._client.call(known.spans[0].rank, "free", name=known.name)

    def configure(self, what: object = None, *, timeout: float | None = None, **settings: float) -> Handle[None]:
        """Change settings of server-side optimizers, such as `lr` and `weight_decay`, from the next push on.

        For all tensors, or for those of `what`: a group. On every shard between the same two versions. On await
        RemoteError for a setting that the rule does not have.
        """
        self._check()
        knowns, _ = self._names.resolve(what)
        if not settings:
            raise ValueError("configure() without settings: expected some, such as lr=0.1")
        for known in knowns:
            _check_settings(known, settings)
        programs = [self._client.configuring(known, settings) for known in knowns]
        return self._run("configure", concurrently(programs) if programs else _nothing(), timeout)

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
        `values`: a tensor, a list of tensors, or an object; None: what lies in the tensors themselves, or in their
        `.grad`, where the rule takes gradients. Done when applied on the servers; with `Synchronous` and `Quorum` when
        they have it for its step. Until then it must not be changed, if it has more than some 30 KB.

        Raises KeyError for an unknown name, TypeError and ValueError for another dtype, shape or number of values, for
        an unknown rule and on a rank that is no worker; RemoteError on await for what a rule raised on a server,
        PeerLost when the server is gone. Cost: its bytes once over the network; 20 us for small ones, a third of that
        each when many are issued before one `sync`.
        """
        self._check()
        pushed, single = self._pushed(what, values, rule, alpha)
        handle = self._handle("push", sum(value.nbytes for _, value, _ in pushed), timeout)
        claims = self._claim(handle, pushed, [])
        operation = Operation(handle, len(pushed), claims, _none)
        self._start_pushes(operation, pushed, alpha)
        if not pushed:
            handle.resolve(None)
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

        `what` as in `push`; the result is one, or a list. It holds what this rank pushed before. With "snapshot" all of
        a tensor is of one version, at least `at_least`; with "lock-free" it is read while others write. The handle's
        `version` says which (of a list the lowest). Under `Synchronous` it waits for the steps of this rank's pushes.
        """
        self._check()
        knowns, single = self._names.resolve(what)
        outs = self._outs(knowns, single, out)
        handle = self._handle("pull", sum(flat.nbytes for flat, _ in outs if flat is not None), timeout)
        claims = self._claim(handle, [], outs)
        mode = self._reads if reads is None else _READS[_one_of("reads", reads, tuple(_READS))]
        self._start_pulls(handle, len(knowns), claims, (knowns, outs), single, (mode, int(at_least)))
        return handle

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
        """Push, and return what the tensors are after that: `push` and `pull` in one, which also raises what they do."""
        self._check()
        pushed, single = self._pushed(what, values, rule, alpha)
        knowns = [known for known, _, _ in pushed]
        outs = self._outs(knowns, single, out)
        handle = self._handle("push_pull", sum(value.nbytes for _, value, _ in pushed), timeout)
        claims = self._claim(handle, pushed, outs)
        pulls = (knowns, outs)
        self._start_pulls(handle, 2 * len(knowns), claims, pulls, single, (self._reads, 0), (pushed, alpha))
        return handle

    def prefetch(self, what: object = None, *, timeout: float | None = None) -> Handle[Any]:
        """Begin to pull into new memory, for the next `integrate`; returns that memory."""
        self._check()
        knowns, single = self._names.resolve(what)
        outs = [None if known.tensor is None else torch.empty_like(known.tensor) for known in knowns]
        handle = self.pull(what, outs[0] if single else outs, timeout=timeout)
        for i, known in enumerate(knowns):
            self._prefetched[known.name] = (handle, None if single else i)
        return handle

    def integrate(
        self, fn: Callable[[Tensor, Tensor], object], what: object = None, *, timeout: float | None = None
    ) -> Handle[Any]:
        """Call `fn(mine, theirs)` for each tensor, on the loop, with what was prefetched, or is pulled now.

        `fn` changes `mine`, the tensor that was init()ed, in place, without autograd. Returns the tensors. What `fn`
        raises is raised by the await.
        """
        self._check()
        knowns, single = self._names.resolve(what)
        for known in knowns:
            if known.tensor is None:
                raise TypeError(f"integrate of {known.name!r}: expected a tensor, not an object")
        missing = [known for known in knowns if known.name not in self._prefetched]
        if missing:
            self.prefetch([known.name for known in missing], timeout=timeout)
        fetched = [self._prefetched.pop(known.name) for known in knowns]
        handle = self._handle("integrate", 0, timeout)
        tensors = [known.tensor for known in knowns if known.tensor is not None]
        Integration(handle, fn, tensors, fetched, single=single).begin()
        return handle

    # --- waiting -----------------------------------------------------------------------------------------------

    def sync(self, *, timeout: float | None = None) -> Handle[None]:
        """Be done when every push that this rank issued before is applied (or dropped, as the consistency says).

        Raises, on await, what made one fail after it was accepted. Covers push handles that nobody awaited.
        """
        self._check()
        handle = self._handle("sync", 0, timeout)
        account, seq = self._account, handle.seq
        handle.add_done_callback(lambda _: account.cover(seq))
        handle._consumed = False
        self._client.sync(handle)
        return handle

    def barrier(self, *, timeout: float | None = None) -> Handle[None]:
        """Wait for all workers that have not left. After `await push`, then this, every later pull sees the push."""
        self._check()
        if not self.is_worker:
            raise ValueError(f"barrier() on rank {self.rank}: expected a worker, one of {list(self.workers)}")
        return self._run("barrier", self._asking(self.servers[0], "barrier"), timeout)

    # --- how it is done ----------------------------------------------------------------------------------------

    def _asking(self, rank: int, op: str) -> Program[None]:
        yield from self._client.call(rank, op)

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if asyncio._get_running_loop() is not self._loop:
            raise RuntimeError(
                f"parameter server {self._coll.name!r} belongs to another thread or event loop: call it on the loop it "
                "was opened on"
            )

    def _check_opened(self) -> None:
        if not hasattr(self, "_server"):
            raise RuntimeError("the parameter server is not open: use `async with`")

    def _handle(self, op: str, nbytes: int, timeout: float | None) -> Handle[Any]:
        handle: Handle[Any] = Handle(
            self._progress, op, self._client.number, nbytes, whence(3), self._account
        )
        seconds = self.timeout if timeout is None else timeout
        if seconds is not None:
            handle.set_deadline(seconds, self._client.late)
        return handle

    def _run(self, op: str, program: Program[Any], timeout: float | None) -> Handle[Any]:
        """Return the handle of a program."""
        handle = self._handle(op, 0, timeout)
        self._client.programs.add(handle)

        def finish(result: Any, error: BaseException | None) -> None:  # noqa: ANN401
            self._client.programs.discard(handle)
            if handle.done():
                return
            if error is None:
                handle.resolve(None)
            else:
                handle.reject(self._client.located(error))

        self._progress.start(partial(run, program, finish))
        return handle

    def _rule(self, rule: RuleLike | None) -> tuple[int, Rule]:
        """Return the number and the rule that a call means; None is the first."""
        if rule is None:
            return 0, next(iter(self._rules.values()))
        for number, (name, known) in enumerate(self._rules.items()):
            if rule is known or rule == name or getattr(known, "fn", None) is rule:
                return number, known
        known_names = ", ".join(self._rules)
        raise ValueError(f"unknown rule {rule!r}: expected one that all ranks gave at the start, {known_names}")

    def _pushed(
        self, what: object, values: Any, rule: RuleLike | None, alpha: float  # noqa: ANN401
    ) -> tuple[list[tuple[Known, Tensor, int]], bool]:
        """Return what goes up: each tensor's name, flat value and rule; raise unless all of it is as it should be."""
        if not self.is_worker:
            raise ValueError(f"push on rank {self.rank}: expected a worker, one of {list(self.workers)}")
        knowns, single = self._names.resolve(what)
        given = [values] * len(knowns) if values is None else ([values] if single else list(values))
        if len(given) != len(knowns):
            raise ValueError(f"{len(given)} values for {len(knowns)} tensors: expected one for each")
        pushed = []
        for known, value in zip(knowns, given, strict=True):
            number, chosen = (known.rule_number, known.rule) if rule is None else self._rule(rule)
            if known.codec is not None:
                pushed.append((known, known.codec.encode(value), number))
                continue
            chosen.check(known.dtype, alpha)
            pushed.append((known, flat(known.check(self._default(known, chosen) if value is None else value)), number))
        return pushed, single

    def _default(self, known: Known, rule: Rule) -> Tensor:
        """Return what a push sends that was given no value."""
        t = known.tensor
        assert t is not None
        if not rule.takes_gradients:
            return t
        if t.grad is None:
            raise ValueError(f"{known.name!r} has no .grad: expected one, since rule {rule.name!r} takes gradients")
        return t.grad

    def _outs(self, knowns: Sequence[Known], single: bool, out: Any) -> list[_Out]:  # noqa: ANN401
        """Return where the tensors go."""
        given = [None] * len(knowns) if out is None else ([out] if single else list(out))
        if len(given) != len(knowns):
            raise ValueError(f"{len(given)} out tensors for {len(knowns)}: expected one for each")
        outs: list[_Out] = []
        for known, t in zip(knowns, given, strict=True):
            if known.codec is not None:
                outs.append((None, None))
            else:
                checked = known.check(known.tensor if t is None else t, "out")
                outs.append((flat(checked), checked))
        return outs

    def _claim(
        self, handle: Handle[Any], pushed: Sequence[tuple[Known, Tensor, int]], outs: Sequence[_Out]
    ) -> list[Claim]:
        """Claim what the operation reads and writes until it is over; small pushes are copied at the call."""
        small = self._context.post.inline_bytes
        written = [out for out, _ in outs if out is not None and out.nbytes]
        claims = writing(*written)
        taken = {claim.start for claim in claims}
        claims += [c for c in reading(*(v for _, v, _ in pushed)) if c.nbytes > small and c.start not in taken]
        for i, claim in enumerate(claims):
            try:
                in_flight.acquire(*claim, handle)
            except ValueError:
                for held in claims[:i]:
                    in_flight.release(*held)
                raise
        return claims

    def _start_pushes(self, operation: Operation, pushed: Sequence[tuple[Known, Tensor, int]], alpha: float) -> None:
        for known, value, rule in pushed:
            self._client.push(operation, known, value, rule, alpha)

    def _start_pulls(
        self,
        handle: Handle[Any],
        count: int,
        claims: Sequence[Claim],
        pulls: tuple[Sequence[Known], Sequence[_Out]],
        single: bool,
        how: tuple[Reads, int],
        pushes: tuple[Sequence[tuple[Known, Tensor, int]], float] | None = None,
    ) -> None:
        knowns, outs = pulls

        def result() -> Any:  # noqa: ANN401
            results = [part.result() for part in parts]
            return results[0] if single else results

        operation = Operation(handle, count, claims, result)
        parts = [PullPart(operation, known, *out) for known, out in zip(knowns, outs, strict=True)]
        if pushes is not None:
            self._start_pushes(operation, *pushes)
        for part in parts:
            self._client.pull(part, *how)
        if not knowns:
            handle.resolve([])

    def _prefetched_handles(self) -> list[Handle[Any]]:
        return [handle for handle, _ in self._prefetched.values()]


def _none() -> None:
    return None


def _check_settings(known: Known, settings: Mapping[str, float]) -> None:
    """Raise ValueError for a setting that the rule of `known` does not have."""
    expected = getattr(known.rule, "settings", {})
    unknown = [name for name in settings if name not in expected]
    if unknown:
        told = ", ".join(expected) or "none, since it has no settings"
        raise ValueError(f"rule {known.rule.name} of {known.name!r}: {', '.join(unknown)}: expected {told}")


def _nothing() -> Generator[list[Call], None, None]:
    yield []


def _one_of(name: str, value: Any, expected: Sequence[str]) -> Any:  # noqa: ANN401
    if value not in expected:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, expected))}")
    return value


def _rules(rule: RuleLike, more: Mapping[str, RuleLike]) -> dict[str, Rule]:
    """Return every rule by name, the default first: the order gives their numbers on the wire."""
    default = as_rule(rule)
    found = {default.name: default}
    for name, given in more.items():
        if name in RULES or name in found:
            raise ValueError(f"rules: the name {name!r} is taken")
        found[name] = as_rule(given, name)
    for name, known in RULES.items():
        found.setdefault(name, known)
    return found


def _roles(
    coll: Communicator, servers: int | Sequence[int] | None, workers: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that serve and those that work."""
    everybody = range(coll.size)
    if servers is None:
        servers = env.servers(coll.size) or everybody
    if isinstance(servers, int):
        if isinstance(servers, bool) or not 0 < servers < coll.size:
            raise ValueError(f"servers={servers}: expected 1 to {coll.size - 1}, so that a rank is left to work")
        servers = everybody[-servers:]
    serving = tuple(check_rank(rank, coll.size, "servers") for rank in servers)
    if workers is None:
        workers = [rank for rank in everybody if rank not in serving] or everybody
    working = tuple(sorted(check_rank(rank, coll.size, "workers") for rank in workers))
    for name, ranks in (("servers", serving), ("workers", working)):
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"{name}={list(ranks)}: expected at least one rank, each once")
    return serving, working

