"""The file by which rank 0 tells the others where its hub is."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiodist.control.places import outward_host
from aiodist.machine import boot_id

if TYPE_CHECKING:
    from aiodist.control.hub import Hub


@dataclass(frozen=True)
class Notice:
    """What the file says.

    An earlier job may have left one, and its port may be another program's by now. So the hub's token includes the
    `nonce`: a rank that follows an old file, or one of another job, is not let in by anybody, and reads it again.
    """

    boot_id: str
    hosts: tuple[str, ...]
    port: int
    nonce: str

    @classmethod
    def of(cls, hub: Hub, nonce: str) -> Notice:
        """Return the notice for a hub on this host."""
        hosts = (outward_host(), socket.gethostname())
        return cls(boot_id(), hosts, hub.port, nonce)

    @classmethod
    def read(cls, path: Path) -> Notice:
        """Return what the file says; raise `OSError` or `ValueError` when that is nothing for us."""
        try:
            found = json.loads(path.read_bytes())
            return cls(**{**found, "hosts": tuple(found["hosts"])})
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is not there yet") from None
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{path} is no notice of rank 0: {error}") from None

    def write(self, path: Path) -> None:
        """Put the notice there at once as a whole, for the eyes of this user only: it holds the nonce."""
        beside = path.with_name(f".{path.name}.{self.nonce}")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(asdict(self), file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def remove(self, path: Path) -> None:
        """Remove the file, unless a later job has written its own."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if json.loads(path.read_bytes())["nonce"] == self.nonce:
                path.unlink()

    def reachable(self) -> tuple[str, ...]:
        """Return where to try, the likeliest first."""
        return ("127.0.0.1", *self.hosts) if self.boot_id == boot_id() else self.hosts
