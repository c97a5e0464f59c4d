"""The calls that keep values: `save` and `load` of checkpoints, and `rebind` to a communicator of other ranks.

In a rebind all ranks exchange facts, in this order: the versions of the shards; that all names are known to the new
servers; that the servers have their values, from a checkpoint or of before; the marks, which are the numbers of the
last applied pushes; and that later pushes were sent again. A new rank only joins these exchanges.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiodist.checkpoints.saving import check_keep
from aiodist.communicator import Communicator
from aiodist.errors import PeerLost
from aiodist.handles import Handle
from aiodist.handles.calls import located
from aiodist.ps.naming import Naming, each
from aiodist.ps.rows import grouped, packed_rows, unpack
from aiodist.ps.settings import Roles, ServerMember, kept, roles_of
from aiodist.types import renamed

if TYPE_CHECKING:
    from aiodist.ps.context import Context
    from aiodist.ps.log import LoggedPush
    from aiodist.ps.names import NameEntry
    from aiodist.ps.shard import Shard


class Durability(Naming):
    """The calls about checkpoints and other ranks."""

    @renamed(keep="keep_last")
    def save(
        self, path: str | os.PathLike[str], *, keep_last: int | None = None, timeout: float | None = None
    ) -> Handle[Path]:
        """Write a checkpoint of all tensors on the servers, while pushes continue.

        One rank calls it; all ranks see `path`. Each tensor is saved between two steps, the same two on all of its
        shards, with the state of its rules and its version; so are the rows of tables, objects, and the residuals of
        each worker's codecs. The format is that of `aiodist.save`, with a file for each server; the folder is renamed
        when everything is on the disk. Saves and loads are done one after the other.

        Args:
            path: the folder of the checkpoints; each has a folder of its own in it.
            keep_last: number of checkpoints to keep in `path`; None keeps all.
            timeout: seconds from the call until the await raises OperationTimeout; None is the default of the server.

        Returns:
            The checkpoint's own folder.

        Raises:
            ValueError: for a wrong `keep_last`.
            RemoteError: on await, for an error on a server, such as OSError. Older checkpoints stay.
            PeerLost: on await, if a server is lost.
            KeyError: on await, if a tensor was freed meanwhile.

        Example:
            ```python
            folder = await ps.save("runs/ps", keep_last=2)
            ```

        Cost: on each server a thread that writes, and a copy of each tensor that is pushed to before it is written.
        """
        self._session.check()
        check_keep(keep_last)
        said = {"path": os.path.abspath(Path(path)), "keep": keep_last}
        return self._session.run("save", partial(self._folder, "save", said), timeout)

    def load(self, path: str | os.PathLike[str], *, timeout: float | None = None) -> Handle[Path]:
        """Restore a checkpoint on the servers, of any number of servers.

        One rank calls it, after all names that were saved are initialized. Tensors of ranks change when they pull.
        Every byte is compared with its checksum before anything is changed. Worker r gets the residuals that worker r
        had.

        Args:
            path: a checkpoint's own folder; or a folder of several: the newest sound one is loaded.
            timeout: seconds from the call until the await raises OperationTimeout; None is the default of the server.

        Returns:
            The checkpoint's own folder.

        Raises:
            CheckpointDamaged: on await, if none is sound; it names the place.
            MismatchError: on await, for other names, shapes, dtypes, rules or tables; nothing was changed.
            RemoteError: on await, if there is no checkpoint.

        Example:
            ```python
            await ps.save("runs/ps")
            await ps.load("runs/ps")
            await ps.pull(net)
            ```

        Cost: each server reads what it needs into new memory, and all together the rest.
        """
        self._session.check()
        said = {"path": os.path.abspath(Path(path)), "again": False}
        return self._session.run("load", partial(self._folder, "load", said), timeout)

    async def _folder(self, op: str, said: dict[str, Any]) -> Path:
        """Ask the first server for a save or a load, and return the checkpoint's folder."""
        return Path((await self._session.client.call(self._settings.servers[0], op, **said))["folder"])

    @located
    async def rebind(
        self, coll: Communicator, *, servers: int | Sequence[int] | None = None, workers: Sequence[int] | None = None
    ) -> None:
        """Continue on another communicator, such as `await coll.shrink()` or `await coll.grow(n)` returns.

        All its ranks take part: those of before call this, new ones open a `ParameterServer` on it with the same
        settings. `servers` and `workers` are those of the constructor. If you give neither, and all ranks served, all
        ranks of `coll` serve; otherwise the servers that are left serve, and the workers that are left and the new
        ranks work.

        If every server is there, in its place, the servers keep their tensors. Otherwise all restore the last
        checkpoint of `save`, and workers repeat the pushes after it: each push counts once, also one whose await raised
        PeerLost or CommunicatorAborted. Pushes that were known to be applied keep their order; later pushes of a lost
        rank are lost. This needs `checkpoints=True`; without it a push in flight may be lost, so meet at a `barrier`
        before. Other calls in flight raise CommunicatorAborted; pull again.

        Raises PeerLost if servers are missing, or their shards are at different versions, and there is no checkpoint;
        ValueError if no server is left; what `load` raises; MismatchError for other settings.
        """
        await self._rebind(coll, None if servers is None and workers is None else roles_of(coll, servers, workers))

    # --- how a rank rebinds ------------------------------------------------------------------------------------

    async def _rebind(self, coll: Communicator, roles: Roles | None) -> None:
        session = self._session
        session.check_loop()
        entries = {name: self._names[name] for name in self._names.names}
        shards = {shard.name: shard for shard in session.server.shards.values()}
        uids, codes = session.context.uids, session.client.codes
        residuals = [(entry, codes.residual(entry.key, entry.spans)) for entry in entries.values()]
        self._prefetched.clear()
        members = await session.rebind(coll, roles)
        try:
            session.server.saving.keep(shards, uids)
            folder = await self._origin(members, shards)
            placed = [self._placed(entry) for entry in entries.values()]
            await session.run("rebind", partial(each, self._opened, placed, [(None,)] * len(placed)), None)
            await session.exchange({})  # all names are known
            if session.coll.rank == next(rank for rank, member in enumerate(members) if member.size):
                load = partial(session.client.call, session.settings.servers[0], "load", path=folder, again=True)
                await session.run("rebind", load, None)
            await session.exchange({})  # all servers have their values
            await self._push_again(entries, residuals)
            await session.exchange({})  # pushes that were applied before are applied again
        except BaseException as error:
            session.abort_everywhere(error)
            raise

    async def _origin(self, members: Sequence[ServerMember], shards: Mapping[str, Shard]) -> str | None:
        """Return the checkpoint from which servers continue, or None if the shards have their values.

        Raises PeerLost if shards are missing or of different versions, and there is no checkpoint.
        """
        session = self._session
        versions: dict[str, set[int]] = {}
        for said in await session.exchange({"versions": {name: shard.version for name, shard in shards.items()}}):
            for name, version in said.get("versions", {}).items():
                versions.setdefault(name, set()).add(version)
        torn = next((name for name, found in versions.items() if len(found) > 1), None)
        if torn is None and kept(members, session.settings.servers):
            return None
        if session.log is not None and session.context.saved is not None:
            return session.context.saved[1]
        why = f"shards of {torn!r} are at versions {sorted(versions[torn])}" if torn else "a server is missing"
        expected = "a save() before" if session.log is not None else "checkpoints=True, and a save() before"
        raise PeerLost(f"parameter server {session.coll.name!r}: {why}: expected {expected}", lost=-1)

    async def _push_again(
        self, entries: Mapping[str, NameEntry], residuals: Sequence[tuple[NameEntry, Tensor | None]]
    ) -> None:
        """Restore the residuals, and repeat each logged push above the marks of the servers."""
        session = self._session
        marks, versions = await self._marks()
        for entry, whole in residuals:
            entry.base = min(entry.base, versions.get(entry.name, entry.base))
            if whole is not None:
                session.client.codes.take(entry.key, entry.spans, whole)
        for name, push in [] if session.log is None else session.log.above(marks):
            if name in entries:
                blocks = _blocks_of(entries[name], push, session.context)
                session.client.pushes.again(entries[name], push, blocks)
        synced = session.handle("sync", 0, None)
        session.client.pushes.sync(synced, session.account)
        await synced

    async def _marks(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the numbers of this rank's last applied pushes, and the versions of tensors, by name."""
        session = self._session
        led = session.server.shards.led()
        mine = {shard.name: [[client, number] for client, number in shard.marks.items()] for shard in led}
        marks, versions = dict[str, int](), dict[str, int]()
        for said in await session.exchange({"marks": mine, "versions": {shard.name: shard.version for shard in led}}):
            versions |= said["versions"]
            marks |= {name: dict(found).get(session.coll.rank, 0) for name, found in said["marks"].items()}
        return marks, versions

    async def _join(self) -> None:
        """Wait until the others have their values again; this rank is new, but may serve."""
        for _ in range(3):  # versions, names, values
            await self._session.exchange({})
        await self._marks()
        await self._session.exchange({})


def _blocks_of(entry: NameEntry, push: LoggedPush, context: Context) -> list[Tensor]:
    """Return a logged push, cut for the present servers of its tensor."""
    spec = entry.table
    with torch.inference_mode(False), torch.no_grad():
        if spec is None:
            whole = torch.cat(
                [t if numel is None else context.decoded(t, entry.dtype, numel) for t, numel in push.blocks]
            )
            spans = entry.spans
            return [whole] if len(spans) == 1 else [whole[start:stop] for _, start, stop in spans]
        found = [unpack(t, spec) for t, _ in push.blocks]
        chosen = grouped(torch.cat([ids for ids, _ in found]), spec, len(entry.spans))
        rows = chosen.summed(torch.cat([values for _, values in found]))
        return [packed_rows(chosen.ids[block], rows[block]) for block in chosen.blocks()]
