"""The control channel of a job: its hub, and a rank's end of it."""

from aiodist.control import Channel, Hub, connect, exchange, find_hosts, host, in_process
from aiodist.control.client import SocketChannel

__all__ = ["Channel", "Hub", "SocketChannel", "connect", "exchange", "find_hosts", "host", "in_process"]
