"""What `aiodist doctor` runs on each host, with the host's Python: this file's text, so it imports only the standard
library, and works with the Python and the aiodist that are there, of any version.

It reads a JSON object a line and answers each with one: first what to look for, then whom to connect to.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Any

_SECONDS = 5.0


def looked_for(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what is here of what is asked for."""
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in asked["packages"]},
        "aiodist": digest_of_package("aiodist"),
        "folder": os.path.isdir(asked["folder"]),
        "script": digest_of(asked["script"]) if asked["script"] else None,
        "cores": len(os.sched_getaffinity(0)),
    }


def connect_and_listen(host: str, port: int) -> tuple[dict[str, Any], socket.socket | None]:
    """Connect to the launcher, and listen where the way to it begins, for the others to connect."""
    try:
        with socket.create_connection((host, port), timeout=_SECONDS) as to_launcher:
            address = to_launcher.getsockname()[0]
            family = to_launcher.family
        listener = socket.create_server((address, 0), family=family)
    except OSError as error:
        return {"launcher": str(error), "address": None, "port": None}, None
    return {"launcher": "", "address": address, "port": listener.getsockname()[1]}, listener


def connected(others: dict[str, tuple[str, int]]) -> dict[str, str]:
    """Try to connect to each of the others; return why not where that fails."""
    troubles = {}
    for name, (address, port) in others.items():
        try:
            socket.create_connection((address, port), timeout=_SECONDS).close()
        except OSError as error:
            troubles[name] = str(error)
    return troubles


def version(package: str) -> str | None:
    """Return the version that is installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def digest_of(path: str) -> str | None:
    """Return a digest of a file, None where there is none."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError:
        return None


def digest_of_package(name: str) -> str | None:
    """Return a digest of the source files of a package, None where it is not found."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    digest = hashlib.sha256()
    for root in sorted(spec.submodule_search_locations):
        for folder, below, files in os.walk(root, followlinks=True):
            below.sort()
            for file in sorted(file for file in files if file.endswith(".py")):
                path = os.path.join(folder, file)
                digest.update(f"{os.path.relpath(path, root)} {digest_of(path)}\n".encode())
    return digest.hexdigest()[:16]


def main() -> None:
    """Answer two questions, and stay until there are no more."""
    asked = json.loads(sys.stdin.readline())
    where, listener = connect_and_listen(*asked["launcher"])
    print(json.dumps({**looked_for(asked), **where}), flush=True)  # noqa: T201
    others = sys.stdin.readline()
    if others:
        print(json.dumps(connected(json.loads(others))), flush=True)  # noqa: T201
    sys.stdin.readline()
    if listener is not None:
        listener.close()


if __name__ == "__main__":
    main()
