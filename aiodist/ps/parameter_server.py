"""`ParameterServer`: tensors that live on servers, pushed to and pulled from by handles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from aiodist.codecs import Codec
from aiodist.communicator import Communicator
from aiodist.communicator.claims import Claim, acquire, reading, writing
from aiodist.handles import Handle, Operation, join
from aiodist.ps.durability import Durability
from aiodist.ps.embedding import BackwardPushes
from aiodist.ps.names import NameEntry, Pushed, check_apart, named, outs_of, pushed_of
from aiodist.ps.policies import Asynchronous, Policy
from aiodist.ps.requests import PullPart, UserCall
from aiodist.ps.rules import Rule
from aiodist.ps.session import ParameterServerSession
from aiodist.ps.settings import (
    READS,
    STARTS,
    ReadMode,
    RuleLike,
    Settings,
    Start,
    roles_of,
    rules_of,
)
from aiodist.ps.statistics import ParameterServerStatistics
from aiodist.ps.wire import Reads
from aiodist.streams.memory import flat
from aiodist.types import check_int, one_of


class ParameterServer(Durability):
    """Tensors by name, in shards on servers: workers push to them and pull from them.

    Every rank of `coll` opens it as a block, with the same arguments; it uses a communicator of its own. Servers hold
    the shards. Workers push, and their pushes count in the steps. A rank that is neither only reads. A tensor of at
    least `split_bytes` is cut into contiguous blocks over all servers; a smaller one is on one server.

    Args:
        coll: the communicator; all its ranks take part.
        tensors: tensors to `init` when it opens: a module (its parameters by name), a dict, or a list ("0", "1", ...).
            With `start` "root" or "first" every worker and reader has the common values in them then.
        rule: how a server applies a push: a name ("zero", "copy", "add", "axpy", "mul", "min", "max"), a server-side
            optimizer such as `SGD` or `Adam`, or a function `(shard, value) -> None` that changes the flat shard.
        rules: more rules by name, for `init(rule=)` and `push(rule=)`.
        consistency: which pushes make a step, and which workers wait: `Asynchronous()`, `Synchronous("mean")`,
            `Bounded(s)` or `Quorum(n, "mean")`. The mean is for rules that are sums, and for copy; mul, min, max and
            functions get the pushes of a step one by one, in the order of the workers.
        servers: the ranks that hold shards; or their number, for the last ranks, which then only serve. None is the
            number of `aiodist run --servers`, or else all ranks, which work too.
        workers: the ranks that push; None is the ranks that do not serve, or all if all serve.
        start: origin of the first values: "root", the first worker's; "first", those of the first worker that calls
            `init`; "own", each server's block of its own tensor.
        reads: "snapshot" reads a tensor at one version; "lock-free" reads it while it may change.
        codec: compresses pushes to other ranks, of floating-point tensors. If pushes are summed (add, axpy, optimizers,
            rules that combine), the part that a code left out is added to the next push, weighted by its own `alpha`.
            With copy, mul, min, max and functions each push is encoded by itself, so a copy through `TopK` has zeros;
            copy and zero drop what this rank had left out before.
        pull_codec: compresses pulls, as the change since this rank's last pull.
        split_bytes: size in bytes from which a tensor is cut.
        checkpoints: True lets workers keep copies of their pushes until `save` has them, for `rebind` after a server
            was lost.
        timeout: default timeout of its calls, in seconds; None is that of `coll`.

    Raises:
        ValueError: for ranks out of range, or a wrong name of an option.
        MismatchError: on entering, if ranks give different settings.
        RuntimeError: on entering it a second time, and in calls outside of the block.

    Example:
        ```python
        async with aiodist.ParameterServer(coll, net, rule=aiodist.ps.SGD(lr=0.1)) as ps:
            for xb, yb in batches:
                net.zero_grad()
                loss_fn(net(xb), yb).backward()
                await ps.push(net)  # gradients to the servers
                await ps.pull(net)  # parameters back
        ```

    Inside the block a rank that only serves does nothing; leaving it, every rank waits for the others. An exception in
    the block aborts the parameter server on all ranks. A server answers requests while its event loop runs or waits. It
    also answers while your code blocks the loop's thread, a millisecond later, if that code releases the GIL.
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
        await self._session.open(self._begin, self._join)
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
        """Default timeout of calls, in seconds, or None without one."""
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
        """Send values to the servers, which apply them by a rule.

        Args:
            what: a name, a tensor given to `init`, a module, or a list of these; None is all tensors that it was opened
                with.
            values: a tensor of the shape given to `init`, a list of tensors, or an object. None is the tensors
                themselves, or their `.grad` if the rule takes gradients.
            rule: the rule; None is that of each tensor.
            alpha: factor of the values, for rules that are sums.
            timeout: seconds from the call until the await raises OperationTimeout; None is the default of the server.

        Returns:
            None, when the servers have applied the push; with `Synchronous` and `Quorum` when they hold it for its
            step. Do not change values of more than about 30 KB before that.

        Raises:
            KeyError: for an unknown name.
            TypeError: for values of another dtype.
            ValueError: for another shape or number of values, an unknown rule, or on a rank that is no worker.
            RemoteError: on await, for an error of a rule on a server.
            PeerLost: on await, if the server is lost.

        Example:
            ```python
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            await ps.push(net, [p.grad for p in net.parameters()], rule="add", alpha=-0.1)
            ```

        Cost: its bytes once over the network; 20 us for small values, a third of that each if many are issued before
        one `sync`.
        """
        session = self._session
        session.check("push")
        one = self._names.plain(what, values) if rule is None and type(alpha) is float and alpha == 1 else None
        pushed = [one] if one is not None else pushed_of(*self._names.resolve(what), values, self._wanted(rule), alpha)
        nbytes = sum([each.value.nbytes for each in pushed])
        handle = session.handle("push", nbytes, timeout)
        claims: list[Claim] = []
        if nbytes > session.context.coalescer.inline_bytes:
            claims = self._claims(pushed)
            acquire(claims, handle)
        operation, push = UserCall(handle, len(pushed), claims), session.client.pushes.push
        if len(pushed) == 1:
            push(operation, *pushed[0], alpha)
        else:
            with session.client.queue.together():
                for each in pushed:
                    push(operation, *each, alpha)
        if not pushed:
            Operation.of(handle).resolve(None)
        if session.context.coalescer.congested:
            session.progress.try_poll()
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
        """Read tensors from the servers.

        The values include the pushes that this rank issued before. With `Synchronous` they wait for the steps of those
        pushes.

        Args:
            what: as in `push`.
            out: a tensor of the shape given to `init`, or a list of tensors, for the result; None writes into the
                tensors given to `init`.
            reads: "snapshot" or "lock-free"; None is the default of the server.
            at_least: the lowest version to return, with "snapshot".
            timeout: seconds from the call until the await raises OperationTimeout; None is the default of the server.

        Returns:
            The tensor, or a list of them; for an object a new one. The handle's `version` is the version read, of a
            list the lowest.

        Raises:
            KeyError: for an unknown name.
            TypeError: for an `out` of another dtype.
            ValueError: for another shape or number of `out`.
            RuntimeError: for an `out` that requires grad, in grad mode.
            PeerLost: on await, if the server is lost.

        Example:
            ```python
            await ps.pull(net)  # into the parameters
            weight = await ps.pull("weight", out=torch.empty(1, 8))
            ```

        Cost: its bytes once over the network; none within a host, from an arena.
        """
        self._session.check()
        found = self._names.resolve(what)
        version = check_int("at_least", at_least, 0, (1 << 63) - 1)
        mode = READS[one_of("reads", self._read_mode if reads is None else reads, tuple(READS))]
        return self._pull("pull", found, out, (mode, version), timeout)

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
        """Push, and then read the result: `push` and `pull` in one; arguments, errors and costs are those of both.

        A tensor of `out` may be the tensor that is pushed for the same name. Raises ValueError for any other tensor
        that overlaps a pushed one.
        """
        self._session.check("push")
        found = self._names.resolve(what)
        pushed = pushed_of(*found, values, self._wanted(rule), alpha)
        reads = Reads.SNAPSHOT if self._read_mode == "snapshot" else Reads.AFTER_OWN
        return self._pull("push_pull", found, out, (reads, 0), timeout, pushed, alpha)

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
        """Begin to pull into new memory, for the next `integrate`; return that memory.

        Errors and costs are those of `pull`.
        """
        self._session.check()
        entries, single = self._names.resolve(what)
        outs = [None if entry.tensor is None else torch.empty_like(entry.tensor) for entry in entries]
        names = [entry.name for entry in entries]
        handle = self.pull(names[0] if single else names, outs[0] if single else outs, timeout=timeout)
        Operation.of(handle).set_op("prefetch")
        for entry, out in zip(entries, outs, strict=True):
            if out is not None:
                self._prefetched[entry.name] = (handle, out)
        return handle

    def integrate(
        self, fn: Callable[[Tensor, Tensor], object], what: object = None, *, timeout: float | None = None
    ) -> Handle[Any]:
        """Call `fn(mine, theirs)` for each tensor, on the loop, with prefetched values, or those of a `pull`.

        Both have the shape given to `init`; `fn` changes `mine`, the tensor itself, in place, without autograd. Returns
        the tensors. Raises TypeError for an object, ValueError for a tensor twice, on await what `fn` raises. Cost: a
        `pull` of the tensors that were not prefetched.
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
        operation = Operation.of(self._session.handle("integrate", 0, timeout))
        tensors = [entry.tensor for entry in entries if entry.tensor is not None]

        def finish(_: object) -> None:
            try:
                with torch.no_grad():
                    for mine, (pull, theirs) in zip(tensors, fetched, strict=True):
                        pull.result()  # raises what made it fail
                        fn(mine, theirs)
            except Exception as error:  # noqa: BLE001  - it belongs to the task that awaits the handle
                operation.reject(error)
                return
            versions = (pull.version for pull, _ in fetched if pull.version is not None)
            operation.set_version(min(versions, default=None))
            operation.resolve(tensors[0] if single else tensors)

        pulls = {id(pull): pull for pull, _ in fetched}.values()
        one_over = join(len(pulls), finish)
        for pull in pulls:
            pull.add_done_callback(lambda _: one_over(None))
        if not pulls:
            finish(None)
        return operation.handle

    # --- waiting -----------------------------------------------------------------------------------------------

    def sync(self, *, timeout: float | None = None) -> Handle[None]:
        """Wait until the servers have every push that this rank issued before: applied, dropped, or held for its step.

        A `barrier` waits for held pushes too. It also waits for pushes whose handles were never awaited. Raises, on
        await, the error of a push that failed after it was accepted. Cost: nothing is sent.
        """
        self._session.check()
        handle = self._session.handle("sync", 0, timeout)
        self._session.client.pushes.sync(handle, self._session.account)
        return handle

    def barrier(self, *, timeout: float | None = None) -> Handle[None]:
        """Wait for all workers that have not left. After `await push` and this call, every later pull sees the push.

        Other workers do not wait for one that waits here: a step without its pushes is made of the others. After the
        barrier every worker is at the same step, however many pushes each had made. Raises ValueError on a rank that is
        no worker; on await PeerLost if the first server is lost, and the error of a push that failed after it was
        accepted. Cost: one message to each server, and an answer.
        """
        self._session.check("barrier()")
        return self._session.run("barrier", self._session.client.meeting, timeout)

    # --- how a rank pushes and pulls ---------------------------------------------------------------------------

    def _wanted(self, rule: RuleLike | None) -> tuple[int, Rule] | None:
        return None if rule is None else self._settings.rule(rule)

    def _claims(self, pushed: Sequence[Pushed], outs: Sequence[Tensor] = ()) -> list[Claim]:
        """Return the claims of an operation, without those of small values, which are copied at the call."""
        claims, small = writing(*(t for t in outs if t.nbytes)), self._session.context.coalescer.inline_bytes
        written = {claim.start for claim in claims}
        pushes = [each.value for each in pushed if each.value.nbytes > small]
        large = [value for value in pushes if value.data_ptr() not in written]
        return claims + reading(*large)

    def _pull(
        self,
        op: str,
        what: tuple[list[NameEntry], bool],
        out: Any,  # noqa: ANN401
        how: tuple[Reads, int],
        timeout: float | None,
        pushed: Sequence[Pushed] = (),
        alpha: float = 1.0,
    ) -> Handle[Any]:
        """Push with that alpha, then pull into `out`. `how` has the kind of the read and the lowest version."""
        (entries, single), client, context = what, self._session.client, self._session.context
        outs = outs_of(entries, out, single)
        into = [None if t is None else flat(t) for t in outs]
        check_apart(pushed, entries, into)
        written = [t for t in into if t is not None]
        nbytes = sum([t.nbytes for t in ([each.value for each in pushed] or written)])
        handle = self._session.handle(op, nbytes, timeout, depth=4)
        claims = self._claims(pushed, written)
        acquire(claims, handle)
        hosts = [None if t is None else context.host_for(t) for t in into]
        landings = [
            context.landing(host, t)
            for host, t in zip(hosts, into, strict=True)
            if t is not None and host is not None and host is not t
        ]

        def result() -> Any:  # noqa: ANN401
            found = [
                t if part.value is None or part.entry.codec is None else part.entry.codec.decode(part.value)
                for part, t in zip(parts, outs, strict=True)
            ]
            return found[0] if single else found

        operation = UserCall(handle, len(pushed) + len(entries), claims, result, landings)
        parts = [_part(operation, entry, t) for entry, t in zip(entries, hosts, strict=True)]
        with client.queue.together():
            for each in pushed:
                client.pushes.push(operation, *each, alpha)
            for part in parts:
                client.pulls.pull(part, *how)
        if not parts:
            Operation.of(handle).resolve(result())
        return handle


def _part(operation: UserCall, entry: NameEntry, into: Tensor | None) -> PullPart:
    """Return the pull of one tensor into flat `into`, or of an object."""
    if into is None:
        return PullPart(operation, entry, 0)
    blocks = {rank: into[start:stop] for rank, start, stop in entry.spans}
    return PullPart(operation, entry, into.nbytes, blocks.__getitem__)
