"""Hear the warnings of a test, and no others."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = ["heard"]


@contextmanager
def heard(shown: Literal["always", "default"] = "always") -> Iterator[list[warnings.WarningMessage]]:
    """Collect the warnings of the block; handles that earlier tests dropped are reported before the block."""
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(shown)
        yield caught
