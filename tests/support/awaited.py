"""The result of a function, which may be a coroutine function."""

from __future__ import annotations

import inspect
from typing import Any


async def awaited(made: Any) -> Any:
    """Return `made`, or what it gives if it is to be awaited."""
    return await made if inspect.isawaitable(made) else made
