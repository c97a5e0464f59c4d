"""A parameter server goes on with other ranks: what servers have is there again, and each push counts once.

All ranks that were there do this together, and ranks that are new wait for them. They tell one another, in this order:
what versions servers have; that all names are known to the new servers; that these have what a checkpoint has, or what
the servers had; and up to which push of each client. Then clients send what is not in that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiodist.errors import PeerLost
from aiodist.ps.rows import grouped, packed_rows, unpack
from aiodist.ps.settings import ServerMember, kept

if TYPE_CHECKING:
    from aiodist.ps.context import Context, Logged
    from aiodist.ps.names import NameEntry
    from aiodist.ps.session import ParameterServerSession
    from aiodist.ps.shard import Shard


async def join(session: ParameterServerSession) -> None:
    """Wait until the others have what there was; this rank is new, but may serve."""
    for _ in range(3):  # as those who were there do, before they tell where servers are
        await session.told({})
    await _told_marks(session)
    await session.told({})


class Rebinding:
    """One rank's part."""

    def __init__(self, session: ParameterServerSession, entries: Sequence[NameEntry]) -> None:
        self._session = session
        self._entries = {entry.name: entry for entry in entries}
        self._before: dict[str, Shard] = {shard.name: shard for shard in session.server.shards.values()}
        self._uids = session.context.uids
        self._residuals = {entry.name: session.client.codes.residual(entry.key, entry.spans) for entry in entries}

    async def find(self, members: Sequence[ServerMember]) -> str | None:
        """Return the checkpoint with which servers go on, None for what they have; raise PeerLost for neither."""
        session = self._session
        saving = session.server.saving
        saving.before, saving.uids_before = self._before, self._uids
        told = await session.told({"versions": {name: shard.version for name, shard in self._before.items()}})
        versions: dict[str, set[int]] = {}
        for each in told:
            for name, version in each.get("versions", {}).items():
                versions.setdefault(name, set()).add(version)
        torn = next((name for name, found in versions.items() if len(found) > 1), None)
        if torn is None and kept(members, session.settings.servers):
            return None
        if session.log is not None and session.context.saved is not None:
            return session.context.saved[1]
        why = f"shards of {torn!r} are at versions {sorted(versions[torn])}" if torn else "not all servers are left"
        expected = "a save() since, " if session.log is not None else "checkpoints=, and a save() since, "
        raise PeerLost(f"parameter server {session.coll.name!r}: {why}: expected {expected}to go on from", lost=-1)

    async def restore(self, folder: str | None, members: Sequence[ServerMember]) -> None:
        """Have servers take what they had, or what the checkpoint has; then each push once that came after it."""
        session = self._session
        await session.told({})  # all names are known
        if session.coll.rank == next(rank for rank, member in enumerate(members) if member.size):
            load = partial(session.client.call, session.settings.servers[0], "load", path=folder, again=True)
            await session.run("rebind", load, None)
        await session.told({})  # all servers have it
        marks, versions = await _told_marks(session)
        for name, entry in self._entries.items():
            entry.base = min(entry.base, versions.get(name, entry.base))
        for name, entry in self._entries.items():
            if (whole := self._residuals[name]) is not None:
                session.client.codes.take(entry.key, entry.spans, whole)
        for name, push in [] if session.log is None else session.log.above(marks):
            if name in self._entries:
                entry = self._entries[name]
                session.client.pushes.again(entry, push, blocks_of(entry, push, session.context))
        synced = session.handle("sync", 0, None)
        session.client.pushes.sync(synced, session.account)
        await synced
        await session.told({})  # what was applied is so again


async def _told_marks(session: ParameterServerSession) -> tuple[dict[str, int], dict[str, int]]:
    """Return up to which number servers have this rank's pushes, and their versions, by name."""
    led = session.server.shards.led()
    marks = {shard.name: [[client, number] for client, number in shard.marks.items()] for shard in led}
    told = await session.told({"marks": marks, "versions": {shard.name: shard.version for shard in led}})
    mine, versions = dict[str, int](), dict[str, int]()
    for each in told:
        versions |= each["versions"]
        mine |= {name: dict(found).get(session.coll.rank, 0) for name, found in each["marks"].items()}
    return mine, versions


def blocks_of(entry: NameEntry, push: Logged, context: Context) -> list[Tensor]:
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
        rows = chosen.summed(torch.cat([each for _, each in found]))
        return [packed_rows(chosen.ids[block], rows[block]) for block in chosen.blocks()]
