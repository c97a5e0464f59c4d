"""The file in which a listening rank writes its address and a secret, for other ranks that see the file."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from aiodist.control.places import outward_host
from aiodist.machine import boot_id

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Notice:
    """The content of the file with the address of a listening rank 0.

    An earlier job may have left a file, whose port may now belong to another program. So the token of the listener
    includes the `nonce`: a rank with an old file, or that of another job, is refused, and reads the file again.
    """

    boot_id: str
    hosts: tuple[str, ...]
    port: int
    nonce: str

    @classmethod
    def of(cls, port: int, nonce: str) -> Notice:
        """Return the content for a listener of this host."""
        return cls(boot_id(), (outward_host(), socket.gethostname()), port, nonce)

    @property
    def likely_hosts(self) -> tuple[str, ...]:
        """Hosts to try, the likeliest first."""
        return ("127.0.0.1", *self.hosts) if self.boot_id == boot_id() else self.hosts

    @classmethod
    def read(cls, path: Path) -> Notice:
        """Return the content of the file. Raises `OSError` or `ValueError` for another content."""
        try:
            found = json.loads(path.read_bytes())
            return cls(**{**found, "hosts": tuple(found["hosts"])})
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is not there yet") from None
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{path} is no notice of rank 0: {error}") from None

    def write(self, path: Path) -> None:
        """Write the file in one atomic step, readable for this user only, since it has the nonce."""
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
