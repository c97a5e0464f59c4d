"""The compiled core: collectives of a host, and waiting for them; see `core/`."""

from collections.abc import Callable, Generator, MutableMapping, Sequence, Sized
from types import CodeType, FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
Buffer = memoryview | bytearray

BLOCK_BYTES: int
DOORBELL_BYTES: int
NUMBERS_BYTES: int
STAGE_BYTES_PER_RANK: int
KEY_BITS: int
DIFFERENT: int
ABANDONED: int
STOPPED: int
UNLIKE: int

def kernels() -> str: ...
def allreduce_method(function: F, /) -> F: ...
def frames_of_thread(thread_id: int, /) -> list[tuple[FrameType, int]]: ...
def write_checked(fd: int, memory: Buffer, parts: list[tuple[int, int, int]], /) -> list[int]: ...
def rows_find(cells: int, mask: int, ids: int, count: int, slots: int, /) -> None: ...
def rows_add(cells: int, mask: int, ids: int, count: int, first: int, /) -> None: ...
def arrived(rings: tuple[Rings, ...], until: float, /) -> bool: ...

class Memory:
    def set_event(self, event: int, /) -> None: ...
    def map(self, segment: int, buffer: Buffer, /) -> None: ...

class Doorbell:
    def __init__(self, memory: Buffer = ..., /) -> None: ...
    def ring(self) -> None: ...
    def call(self, event: int = -1, /) -> None: ...
    def set_loop_waits(self, waits: bool, /) -> None: ...
    def wait(self, seconds: float | None, for_all: bool = True, times: int = 1, rest: float = 0.0) -> None: ...

class Rings:
    def __init__(self, numbers: Buffer, nbytes: int, /) -> None: ...
    @property
    def arrived(self) -> bool: ...
    @property
    def fill(self) -> int: ...
    @property
    def met(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_mapped(self) -> bool: ...
    @property
    def returned(self) -> int: ...
    @property
    def drained(self) -> int: ...
    @property
    def segment(self) -> int: ...
    @property
    def offset(self) -> int: ...
    def meet(self, numbers: Buffer, /) -> None: ...
    def open(self, memory: Buffer, segment: int, offset: int, /) -> None: ...
    def map(self, memory: Buffer, /) -> None: ...
    def put(
        self,
        kind: int,
        comm: int,
        tag: int,
        number: int,
        nbytes: int,
        segment: int,
        offset: int,
        size: int = 0,
        data: int | Buffer = 0,
        /,
    ) -> bool: ...
    def first(self) -> tuple[int, int, int, int, int, int, int, int] | None: ...
    def copy(self, address: int, /) -> None: ...
    def data(self) -> bytes: ...
    def take(self) -> None: ...
    def give_back(self, nbytes: int, /) -> None: ...
    def take_data(self, nbytes: int, /) -> bytearray: ...
    def drain(self) -> None: ...

class Form:
    def __init__(self, like: Any, tensor: type, parameter: type, /) -> None: ...
    def bytes(self, tensor: object, /) -> bytes | None: ...

class Engine:
    def __init__(self, doorbell: Buffer, spin: float, /) -> None: ...
    def spin(self, seconds: float, /) -> None: ...
    def stop(self) -> None: ...
    def forget(self) -> None: ...

class Completions:
    event: int
    pending: int
    telling: int
    def __init__(self, doorbell: Doorbell, /) -> None: ...
    @property
    def heavy(self) -> bool: ...
    def poll(self, seconds: float, /) -> bool: ...
    def tell(self) -> bool: ...
    def sleep(self) -> bool: ...
    def woken(self) -> bool: ...

class LaneOperation:
    met: int

class Lane:
    arena_bytes: int
    ordinary_bytes: int
    @property
    def lent_bytes(self) -> int: ...
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
    def join(self, rank: int, block: Buffer, memory: Memory, doorbell: Buffer, /) -> None: ...
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
        keep: object,
        /,
    ) -> LaneOperation: ...
    def stop(self, key: int, /) -> None: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...

class Handle:
    @property
    def op(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def source(self) -> int | None: ...
    @property
    def tag(self) -> int | None: ...
    @property
    def version(self) -> int | None: ...
    _op: str
    _nbytes: int
    _source: int | None
    _tag: int | None
    _version: int | None
    _progress: Any
    _account: Any
    _status: Any
    _value: Any
    _traceback: Any
    _waiters: Any
    _callbacks: Any
    _event: Any
    _canceller: Any
    _expires: float | None
    _late: Callable[[], dict[int, str]] | None
    _finisher: Callable[[], object] | None
    _keep: Any
    _fence: Any
    _parts: Any
    _name: str | None
    _observer: Callable[..., object] | None
    _consumed: bool
    _detached: bool
    _given_up: bool
    _posted: bool
    _writes: bool
    _looked_at: bool
    _polled: bool
    @property
    def _origin(self) -> tuple[CodeType, int] | None: ...
    def __init__(
        self,
        progress: Pacer,
        op: str,
        seq: int = 0,
        nbytes: int = 0,
        origin: tuple[CodeType, int] | None = None,
        account: object = None,
        writes: bool = False,
    ) -> None: ...
    def __await__(self) -> Generator[Any, None, Any]: ...
    def done(self) -> bool: ...
    @property
    def _is_pending(self) -> bool: ...
    @property
    def _in_lane(self) -> bool: ...
    def _look(self) -> bool: ...
    def _sleep(self, seconds: float, /) -> bool: ...
    def _rest(self, seconds: float, /) -> bool: ...

def set_statuses(pending: object, returned: object, /) -> None: ...

class Pacer:
    last_ran: float
    looked_in_vain: float
    spin_seconds: float
    polls: int
    crowded: bool
    fair: bool
    counts_waits: bool
    computing: set[int]
    thread_id: int
    def look_until(self, now: float, /) -> float: ...

class Segments(Sized):
    told: int
    def add(self, address: int, nbytes: int, /) -> None: ...
    def locate(self, address: int, nbytes: int, /) -> tuple[int, int] | None: ...
    def __len__(self) -> int: ...

class Claims(Sized):
    def claim(self, start: int, nbytes: int, writes: bool, owner: object, /) -> object: ...
    def acquire_all(self, claims: Sequence[tuple[int, int, bool, *tuple[object, ...]]], owner: object, /) -> None: ...
    def release_all(self, claims: Sequence[tuple[int, int, bool, *tuple[object, ...]]], /) -> None: ...
    def release(self, start: int, nbytes: int, writes: bool, /) -> None: ...
    def checksum(self, start: int, nbytes: int, /) -> int: ...
    def __len__(self) -> int: ...

class Log:
    seq: int
    awaited: Any
    timed: bool
    caller: tuple[CodeType, int] | None
    def arrivals(self, since: int, /) -> bytes: ...
    def kept(self, seq: int, /) -> tuple[int, Any, tuple[CodeType, int]] | None: ...
    def record(self, what: object, origin: tuple[CodeType, int], nbytes: int = 0, /) -> None: ...
    def counts(self) -> dict[str, tuple[int, int, float]]: ...

class Plan:
    def __init__(
        self,
        what: object,
        name: str,
        otherwise: Callable[[Any, Any, Any, list[Any], Any], None] | None,
        word: int,
        kind: int,
        dtype: int,
        reduction: int,
        root: int,
        like: int,
        count: int,
        nbytes: int,
        target_nbytes: int,
        writes: bool,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        /,
    ) -> None: ...

class Issuer:
    open: bool
    observer: Callable[[Any], Callable[..., object]] | None
    expire: Callable[[Any], object] | None
    strict: bool
    threads: bool
    def __init__(
        self,
        lane: Lane,
        claims: Claims,
        log: Log,
        pacer: Pacer,
        segments: Segments,
        account: object,
        pending: MutableMapping[Any, Any],
        inbox: Sized,
        to_fail: dict[int, Any],
        ours: dict[str, bool | None],
        watch: object,
        publish: Callable[[], object],
        failed: Callable[[Any, Any], object],
        changed: Callable[[Any, Any, Any], object],
        handle: type[Handle],
        tensor: type[Any],
        parameter: type[Any],
        increment: Callable[[Sequence[Any]], object],
        grad_enabled: Callable[[], bool],
        inference: Callable[[], bool],
        /,
    ) -> None: ...
    def issue(
        self, plan: Plan, t: object, target: object, result: object, out: object, others: tuple[object, ...] = (), /
    ) -> Handle | None: ...
    def add(self, t: object, op: str | None, impl: str, plan: Plan, /) -> None: ...
    def forget(self) -> None: ...
