"""Bytes and seconds as people write them."""

from __future__ import annotations


def size_text(nbytes: int | None) -> str:
    """Return bytes as people write them, without rounding.

    >>> size_text(1024), size_text(64 << 20), size_text(1077)
    ('1 KiB', '64 MiB', '1077 B')
    """
    if nbytes is None:
        return ""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def seconds_text(seconds: float | None) -> str:
    """Return seconds in a unit that suits them.

    >>> seconds_text(4.56e-06), seconds_text(0.0123), seconds_text(2.5)
    ('4.56 us', '12.3 ms', '2.5 s')
    """
    if seconds is None:
        return ""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"
