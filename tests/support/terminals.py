"""A program in the foreground of a terminal, whose keys a test types."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Terminal", "in_terminal"]

_TAKE = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execv(sys.argv[1], sys.argv[1:])"
"""The first terminal that the leader of a session opens is that of the session."""


class Terminal:
    """The user's side of the terminal."""

    def __init__(self, process: subprocess.Popen[bytes], user: int, limit: float) -> None:
        self.process = process
        self.text = ""
        """All output so far, with line ends as in files."""
        self._user = user
        self._limit = limit
        self._seen = 0

    def settings(self) -> list[Any]:
        """Return the settings of the terminal, such as the echo of keys."""
        return termios.tcgetattr(self._user)

    def type(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._user, keys.encode())

    def until(self, wanted: str) -> str:
        """Return the output from the last call to the next `wanted`."""
        end = time.monotonic() + self._limit
        while (found := self.text.find(wanted, self._seen)) < 0:
            assert self._read(end), f"the output ended without {wanted!r}:\n{self.text}"
        new = self.text[self._seen : found + len(wanted)]
        self._seen = found + len(wanted)
        return new

    def ask(self, line: str, prompt: str = "(Pdb) ") -> str:
        """Type a line at a prompt, and return the output before the next prompt."""
        self.type(f"{line}\n")
        return self.until(prompt).removeprefix(f"{line}\n").removesuffix(prompt)

    def finish(self) -> int:
        """Return the exit code of the program after its end."""
        end = time.monotonic() + self._limit
        while self._read(end):
            pass
        return self.process.wait(self._limit)

    def _read(self, end: float) -> bool:
        """Take output. Return False at its end."""
        left = end - time.monotonic()
        came, _, _ = select.select([self._user], [], [], max(0.0, left))
        assert came, f"no output within the limit:\n{self.text}"
        try:
            data = os.read(self._user, 1 << 16)
        except OSError:  # the program has ended
            return False
        self.text += data.decode().replace("\r\n", "\n")
        return bool(data)


@contextlib.contextmanager
def in_terminal(command: Sequence[str], folder: Path, environ: dict[str, str], limit: float = 60) -> Iterator[Terminal]:
    """Run a program of Python in a terminal of its own; it is killed at the end."""
    user, programs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-SEc", _TAKE, *command],
        stdin=programs,
        stdout=programs,
        stderr=programs,
        start_new_session=True,
        cwd=folder,
        env={**environ, "TERM": "dumb"},
    )
    os.close(programs)
    try:
        yield Terminal(process, user, limit)
    finally:
        process.kill()
        process.wait()
        os.close(user)
