"""By which address the hosts of a job reach the one that starts it."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from aiodist.control.places import is_loopback, outward_host
from aiodist.errors import ConfigError

LOOPBACK = "127.0.0.1"


def check_known(names: Sequence[str], rsh: str) -> None:
    """Raise `ConfigError` for a host that nobody here knows; an agent of the user's may know more than we do."""
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
    import psutil  # only where somebody asks for an interface

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
