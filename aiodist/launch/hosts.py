"""Which hosts a job runs on, how many ranks each of them gets, and by which address they reach the launcher."""

from __future__ import annotations

import ipaddress
import shlex
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aiodist.control.places import is_loopback, outward_host
from aiodist.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Host:
    """A host by the name that the remote shell takes; `ranks` is None where no number was given."""

    name: str
    ranks: int | None = None

    def __str__(self) -> str:
        return self.name if self.ranks is None else f"{self.name}:{self.ranks}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of a list; raise `ConfigError` for a name given twice or a bad number.

    >>> parse_hosts("a:2,[fe80::1]:3,c")
    (Host(name='a', ranks=2), Host(name='fe80::1', ranks=3), Host(name='c', ranks=None))
    """
    return _unique((_host(part.strip(), f"--hosts {text}"), f"--hosts {text}") for part in text.split(","))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file, one a line: `name`, `name:N` or `name slots=N`; `#` starts a comment.

    Raises `ConfigError`, with file and line, for another line and for a host that is named twice.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path}: {getattr(error, 'strerror', None) or error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        words = line.partition("#")[0].split()
        if words:
            found.append((_line(words, where), where))
    if not found:
        raise ConfigError(f"--hostfile {path}: it names no host")
    return _unique(found)


def placed(hosts: Sequence[Host], ranks: int | None, servers: int = 0) -> tuple[Host, ...]:
    """Return the hosts with the number of ranks of each: `ranks`, where that is given, and `servers` more.

    A host without a number has one rank; where no host has one, all are shared out evenly, the first hosts
    having one more if it does not divide. Numbers that make up `ranks` alone leave the servers to the last host.
    Raises `ConfigError` when the numbers do not agree.

    >>> [str(host) for host in placed([Host("a"), Host("b")], 3)]
    ['a:2', 'b:1']
    >>> [str(host) for host in placed([Host("a", 2), Host("b", 2)], None, servers=1)]
    ['a:2', 'b:3']
    """
    asked = f"-n {ranks}{f' --servers {servers}' if servers else ''}"
    if ranks is not None and all(host.ranks is None for host in hosts):
        if ranks + servers < len(hosts):
            raise ConfigError(f"{asked}: fewer ranks than the {len(hosts)} hosts")
        each, more = divmod(ranks + servers, len(hosts))
        return tuple(Host(host.name, each + (i < more)) for i, host in enumerate(hosts))
    counted = tuple(Host(host.name, 1 if host.ranks is None else host.ranks) for host in hosts)
    total = sum(host.ranks or 0 for host in counted)
    if ranks not in (None, total, total - servers):
        expected = f": expected {ranks}, or {ranks + servers} with the servers" if ranks and servers else ""
        raise ConfigError(
            f"{asked}: the hosts have {total} rank{'s' * (total != 1)} ({', '.join(map(str, counted))}){expected}"
        )
    if ranks in (None, total) and servers:
        last = counted[-1]
        return (*counted[:-1], Host(last.name, (last.ranks or 0) + servers))
    return counted


def ranks_beside(hosts: Sequence[Host], rank: int) -> range:
    """Return the ranks on the host of `rank`, which is among them.

    >>> ranks_beside([Host("a", 1), Host("b", 2)], 2)
    range(1, 3)
    """
    start = 0
    for host in hosts:
        if rank < start + (host.ranks or 0):
            break
        start += host.ranks or 0
    return range(start, start + (host.ranks or 0))


def host_of(hosts: Sequence[Host], rank: int) -> str:
    """Return the name of the host that has `rank`: ranks fill one host after the other.

    >>> [host_of([Host("a", 1), Host("b", 2)], rank) for rank in range(3)]
    ['a', 'b', 'b']
    """
    return [host.name for host in hosts for _ in range(host.ranks or 0)][rank]


def _line(words: Sequence[str], where: str) -> Host:
    host = _host(words[0], where)
    match words[1:]:
        case []:
            return host
        case [slots] if slots.startswith("slots=") and host.ranks is None:
            return Host(host.name, _count(slots.removeprefix("slots="), where))
    raise ConfigError(f"{where}: {' '.join(words)!r}: expected name, name:N or name slots=N")


def _host(text: str, where: str) -> Host:
    name, colon, count = text.rpartition(":")
    if text.endswith("]") or not colon:
        name, count = text, ""
    elif not count:
        raise ConfigError(f"{where}: {text!r}: expected a number of ranks after the colon")
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    elif ":" in name:
        raise ConfigError(f"{where}: {text!r}: expected name:N, an IPv6 address in brackets")
    # It becomes part of command lines: nothing in it may look like an option or a second word.
    if not name or name.startswith("-") or not all(letter.isalnum() or letter in "-._:%@" for letter in name):
        raise ConfigError(f"{where}: {text!r}: expected the name of a host, or name:N")
    return Host(name, _count(count, where) if count else None)


def _count(text: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{where}: {text!r} ranks: expected a whole number of at least 1")
    return int(text)


def _unique(found: Iterable[tuple[Host, str]]) -> tuple[Host, ...]:
    hosts: dict[str, Host] = {}
    for host, where in found:
        if host.name in hosts:
            raise ConfigError(f"{where}: host {host.name} is given twice")
        hosts[host.name] = host
    return tuple(hosts.values())


# --- reaching them ----------------------------------------------------------------------------------------------------

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


def shell_on(name: str, rsh: str, script: str) -> list[str]:
    """Return the command that has a shell on a host run `script`: by the remote shell `rsh`, else ssh, if not here."""
    if is_this_host(name):
        return ["sh", "-c", script]
    return [*(shlex.split(rsh) or _SSH), name, f"sh -c {shlex.quote(script)}"]


# --- addresses ---------------------------------------------------------------------------------------------------


def check_known(names: Sequence[str], rsh: str) -> None:
    """Raise `ConfigError` for an unknown host, unless the user gives a remote shell, which may know other hosts."""
    for name in () if rsh else names:
        try:
            socket.getaddrinfo(name, None)
        except socket.gaierror as error:
            if not _ssh_knows(name):
                raise ConfigError(f"host {name} is not known here: {error.strerror}") from None


def meeting_address(names: Sequence[str], iface: str) -> str:
    """Return the address of this host that the others reach: of `iface`, else of the way to the first other host."""
    if iface:
        return interface(iface)[1]
    known = False
    for name in names:
        with suppress(OSError):
            family, kind, _, _, where = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
            known = True
            with socket.socket(family, kind) as probe:
                probe.connect(where)  # sends nothing: it only asks for the route
                here: str = probe.getsockname()[0]
            if not is_loopback(here):
                return here
    return LOOPBACK if known else outward_host()


def is_this_host(name: str) -> bool:
    """Whether one of the addresses of `name` is this host's."""
    ours = {address.partition("%")[0] for addresses in _addresses().values() for address in addresses}
    with suppress(OSError):
        return any(is_loopback(str(found[4][0])) or found[4][0] in ours for found in socket.getaddrinfo(name, None))
    return False


def interface(choice: str) -> tuple[str, str]:
    """Return name and address of the interface of this host that is called `choice`, or is in that network.

    Raises `ConfigError`, which lists those there are.
    """
    here = {name: addresses for name, addresses in _addresses().items() if addresses}
    with suppress(ValueError):
        network = ipaddress.ip_network(choice, strict=False)
        for name, addresses in here.items():
            for address in addresses:
                if ipaddress.ip_address(address.partition("%")[0]) in network:
                    return name, address
    if choice in here:
        return choice, here[choice][0]
    there = ", ".join(f"{name} {addresses[0]}" for name, addresses in here.items())
    raise ConfigError(
        f"--iface {choice}: expected an interface of this host, or a network such as 10.0.0.0/24: {there}"
    )


def _addresses() -> Mapping[str, list[str]]:
    """Return the addresses of each interface, IPv4 first."""
    import psutil  # only for an option that names an interface

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address for family in families for entry in entries if entry.family == family]
        for name, entries in psutil.net_if_addrs().items()
    }


def _ssh_knows(name: str) -> bool:
    """Whether the user's ssh configuration makes another name of it."""
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=10, check=True).stdout
        for line in said.splitlines():
            word, _, value = line.partition(" ")
            if word == "hostname":
                return value.lower() != name.lower()
            if word in ("proxycommand", "proxyjump"):
                return True
    return False
