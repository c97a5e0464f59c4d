"""Addresses: where the ranks of a job meet.

`tcp://host:port` is a hub that is there already, `file:///path` a file that says where rank 0 has one, `env://`
means the variables MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from aiodist.errors import ConfigError

_AGENT_PORTS = 8


@dataclass(frozen=True)
class TcpPlace:
    """A hub at one of several ports of a host."""

    host: str
    ports: tuple[int, ...]
    hosted: bool = False
    """True if rank 0 opens the hub."""
    secret: str = ""
    """Text that is added to the token, against hubs of other jobs at these ports."""


@dataclass(frozen=True)
class FilePlace:
    """A file that rank 0 writes and all ranks read."""

    path: Path


Place = TcpPlace | FilePlace


def parse(address: str, environ: Mapping[str, str] | None = None) -> Place:
    """Return the place that `address` means; raise `ConfigError` when it means none."""
    scheme, separator, rest = address.partition("://")
    match scheme if separator else "":
        case "tcp":
            return _tcp_place(address)
        case "file":
            path = Path(unquote(rest))
            if not path.is_absolute():
                raise ConfigError(f"rendezvous {address!r}: expected file:///path, with three slashes")
            if path.is_dir():
                raise ConfigError(f"rendezvous {address!r}: {path} is a directory, expected a file in it")
            return FilePlace(path)
        case "env":
            if environ is None:
                raise ConfigError("env://: the variables were not given, pass environ=")
            return _from_environment(environ)
        case _:
            raise ConfigError(
                f"rendezvous {address!r}: unknown scheme {scheme!r}, expected one of tcp://host:port, file:///path, env://"
            )


def tcp_address(host: str, port: int) -> str:
    """Return `tcp://host:port`, an IPv6 address in brackets.

    >>> tcp_address("::1", 4000)
    'tcp://[::1]:4000'
    """
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


async def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """Return a listening socket at `host`, IPv4 or IPv6; `""` is every address of both. Raises `OSError`."""
    try:
        return listen_now(host, port, backlog=backlog)
    except socket.gaierror:  # a name, which may take a while to look up
        return _listen_at(await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM), backlog)


def listen_now(host: str, port: int = 0, *, backlog: int = 128) -> socket.socket:
    """Do as `listen` for an address in numbers, or `""`; raise `socket.gaierror` for another."""
    if not host:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 may be compiled in and turned off
                return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=backlog)
    return _listen_at(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST), backlog)


def _listen_at(found: Sequence[tuple[Any, ...]], backlog: int) -> socket.socket:
    family, _, _, _, where = found[0]
    # For IPv6 `where` has a scope, without which a link-local address cannot be listened at.
    return socket.create_server(where, family=socket.AddressFamily(family), backlog=backlog)


def is_loopback(host: str) -> bool:
    """Return True if `host` is an address of the loopback interface.

    >>> is_loopback("localhost"), is_loopback("::1"), is_loopback("127.0.1.1"), is_loopback("node1")
    (True, True, True, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def outward_host() -> str:
    """Return the most likely address of this host for other hosts."""
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 9))  # sends nothing: it only asks for the route
            return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):  # there is no route to everywhere: what its name stands for
        named = [str(place[0]) for *_, place in socket.getaddrinfo(socket.gethostname(), None)]
        return next(filterfalse(is_loopback, named), "127.0.0.1")
    return "127.0.0.1"


def _tcp_place(address: str) -> TcpPlace:
    expected = "expected tcp://host:port, or tcp://[address]:port for IPv6"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"rendezvous {address!r}: {error}; {expected}") from None
    if not host or not port or parts.path or parts.query or parts.username is not None:
        raise ConfigError(f"rendezvous {address!r}: {expected}")
    return TcpPlace(host, (port,))


def _from_environment(environ: Mapping[str, str]) -> TcpPlace:
    if "MASTER_ADDR" not in environ and "SLURM_JOB_ID" in environ:
        return _from_slurm(environ)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ConfigError(f"env://: {name} is not set; MASTER_ADDR and MASTER_PORT say where rank 0 listens")
    try:
        port = int(environ["MASTER_PORT"])
    except ValueError:
        port = 0
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={environ['MASTER_PORT']!r}: expected a port, 1 to 65535")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "true"):
        return _beside_agent(environ, port)
    return TcpPlace(environ["MASTER_ADDR"], (port,), hosted=True)


def _beside_agent(environ: Mapping[str, str], port: int) -> TcpPlace:
    """Return the ports above MASTER_PORT, which torchrun's agent keeps for itself.

    Rank 0 takes the first that is free, the others try them all; the run's name keeps them from a hub of another.
    """
    first = port + 1 if port + _AGENT_PORTS < 65536 else port - _AGENT_PORTS
    secret = "/".join(environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    ports = tuple(range(first, first + _AGENT_PORTS))
    return TcpPlace(environ["MASTER_ADDR"], ports, hosted=True, secret=f"{port}/{secret}")


def _from_slurm(environ: Mapping[str, str]) -> TcpPlace:
    """Return a port on the first node of the step: `srun` runs rank 0 there, and sets no MASTER_ADDR."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    host = first_node(nodes)
    if not host:
        raise ConfigError("env://: neither MASTER_ADDR nor SLURM_STEP_NODELIST is set")
    job, step = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", "0")
    ports = range(20_000, 30_000, _AGENT_PORTS)
    first = ports[(int(job) * 31 + int(step)) % len(ports)] if (job + step).isdecimal() else ports[0]
    return TcpPlace(host, tuple(range(first, first + _AGENT_PORTS)), hosted=True, secret=f"{job}.{step}")


def first_node(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it.

    >>> first_node("gpu[03-05,9],cpu1"), first_node("a1,b[2-3]"), first_node("r[1-2]n[7,9]")
    ('gpu03', 'a1', 'r1n7')
    """
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).partition(",")[0]
