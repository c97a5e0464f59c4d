"""The compiled core: collectives of a host, and waiting for them; see `core/`."""

from collections.abc import Buffer, Callable, Sequence
from typing import Any

BLOCK_BYTES: int
BELL_BYTES: int
STAGE_BYTES_PER_RANK: int
KEY_BITS: int

def kernels() -> str: ...

class Memory:
    def map(self, segment: int, buffer: Buffer, /) -> None: ...

class Engine:
    def __init__(self, bell: Buffer, spin: float, /) -> None: ...
    def stop(self) -> None: ...
    def forget(self) -> None: ...

class Completions:
    event: int
    pending: int
    @property
    def heavy(self) -> bool: ...
    def poll(self, seconds: float, /) -> bool: ...
    def sleep(self) -> bool: ...
    def woken(self) -> None: ...

class Operation:
    met: int

class Lane:
    def __init__(
        self,
        completions: Completions,
        engine: Engine,
        rank: int,
        ranks: int,
        led: bool,
        block: Buffer,
        stage: Buffer,
        segment: int,
        offset: int,
        map: Callable[[int, int], object],
        fail: Callable[[int, int], BaseException],
        /,
    ) -> None: ...
    def join(self, rank: int, block: Buffer, memory: Memory, bell: Buffer, /) -> None: ...
    def submit(
        self,
        kind: int,
        dtype: int,
        reduction: int,
        root: int,
        print: int,
        key: int,
        in_: int,
        out: int,
        count: int,
        sent: Sequence[int] | None,
        received: Sequence[int] | None,
        segment: int,
        offset: int,
        done: Callable[[BaseException | None], object],
        keep: Any,
        /,
    ) -> Operation: ...
    def refuse(self, key: int, /) -> None: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...
