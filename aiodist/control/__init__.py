"""The control channel: how ranks meet, share small values, exchange messages, and learn which ranks left.

Sockets and asyncio only, neither torch nor MPI. `channel` is the side of a rank, `hub` the other side.
"""

from aiodist.control.channel import Channel, ChannelClosed, exchange
from aiodist.control.hosts import find_hosts
from aiodist.control.hub import Hub
from aiodist.control.local import InProcessChannel, in_process
from aiodist.control.rendezvous import HostedHub, connect, host
from aiodist.control.rollcall import LIVENESS_SECONDS
from aiodist.control.roster import HUB, Exit
from aiodist.control.texts import disagreement, name_ranks, sides
from aiodist.frames import MAX_FRAME

__all__ = [
    "HUB",
    "LIVENESS_SECONDS",
    "MAX_FRAME",
    "Channel",
    "ChannelClosed",
    "Exit",
    "HostedHub",
    "Hub",
    "InProcessChannel",
    "connect",
    "disagreement",
    "exchange",
    "find_hosts",
    "host",
    "in_process",
    "name_ranks",
    "sides",
]
