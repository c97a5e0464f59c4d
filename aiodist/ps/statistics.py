"""What a parameter server did on this rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ParameterServerStatistics:
    """Counts since the parameter server was opened, of this rank alone; seconds are wall-clock time."""

    pushes: int = 0
    """Issued by this rank, one for each tensor."""
    pulls: int = 0
    """Issued by this rank, one for each tensor."""
    push_bytes: int = 0
    """What this rank pushed, as tensors."""
    push_sent_bytes: int = 0
    """What left for it: less where a codec or shared memory served; heads are not counted, nor first values."""
    pull_bytes: int = 0
    """What this rank pulled, as tensors."""
    pull_received_bytes: int = 0
    """What came for it, as `push_sent_bytes`."""
    push_seconds: float = 0.0
    """From issue until the server had done what `await push` promises, summed."""
    pull_seconds: float = 0.0
    """From issue until the values were here, summed."""
    encode_seconds: float = 0.0
    """In codecs, as client and as server."""
    decode_seconds: float = 0.0
    """As `encode_seconds`."""
    applied: int = 0
    """Pushes that this rank applied to its shards, as a server; a tensor in several shards counts in each."""
    steps: int = 0
    """Versions that it made of its shards."""
    step_seconds: float = 0.0
    """In rules and server-side optimizers."""
    served: int = 0
    """Reads of its shards."""
    sent_bytes: int = 0
    """All that left this rank, as client and as server: heads, answers and first values too."""
    held_seconds: float = 0.0
    """How long requests lay here, complete, until it was their turn, summed."""
    dropped: int = 0
    """Pushes that came too late and were thrown away, of tensors that this rank leads."""
    scaled: int = 0
    """Pushes that were weighted for coming late, of tensors that this rank leads."""
    incomplete: int = 0
    """Steps of fewer pushes than the consistency asks for, of tensors that this rank leads: the other workers had left
    or died, or waited at a barrier."""
    rows: int = 0
    """Rows that there are in its parts of tables, now."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many pushes were applied so many versions after the one they were made from; of tensors this rank leads."""
