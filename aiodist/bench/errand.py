"""What ranks are started for: it travels to them as JSON, and they carry it out. Loads no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

from aiodist.env import Environment
from aiodist.errors import BackendUnavailable, ConfigError


@dataclass(frozen=True)
class Errand:
    """Base of what ranks are to measure: numbers, texts, and tuples of them."""

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` made."""
        fields = json.loads(text).items()
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields})

    async def start(self, module: str, ranks: int, **options: Any) -> int:  # noqa: ANN401  - those of `Job`
        """Start ranks that run `module` with this as its argument; return the exit code."""
        from aiodist.launch import job
        from aiodist.launch.commands import Job

        return await job.run(Job(command=("-m", module, self.to_json()), ranks=ranks, prefix=False, **options))


def carry_out(do: Callable[[str], object]) -> None:
    """What such a module does: call `do` with its argument, and exit with 2 where rank 0 says what is wrong."""
    try:
        do(sys.argv[1])
    except (ConfigError, BackendUnavailable) as error:
        if Environment.read().rank == 0:
            print(f"aiodist: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
