"""The statistics of a parameter server on one rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClientStatistics:
    """The part of this rank's client."""

    pushes: int = 0
    """Number of issued pushes, one for each tensor."""
    pulls: int = 0
    """Number of issued pulls, one for each tensor."""
    push_bytes: int = 0
    """Bytes of pushed tensors."""
    push_sent_bytes: int = 0
    """Bytes sent for pushes, fewer with a codec or shared memory. Heads and first values are not counted."""
    pull_bytes: int = 0
    """Bytes of pulled tensors."""
    pull_received_bytes: int = 0
    """Bytes received for pulls, as `push_sent_bytes`."""
    push_seconds: float = 0.0
    """Sum of the times from issue until `await push` returns."""
    pull_seconds: float = 0.0
    """Sum of the times from issue until the values have arrived."""
    encode_seconds: float = 0.0
    """Time in encoders, as client and as server."""
    decode_seconds: float = 0.0
    """Time in decoders, as client and as server."""


@dataclass(frozen=True)
class ParameterServerStatistics(ClientStatistics):
    """Counts since the parameter server was opened, of this rank alone; seconds are wall-clock time."""

    applied: int = 0
    """Number of pushes that this server applied to its shards. A tensor in several shards counts in each."""
    steps: int = 0
    """Number of versions of its shards."""
    step_seconds: float = 0.0
    """Time in rules and server-side optimizers."""
    served: int = 0
    """Number of reads of its shards."""
    sent_bytes: int = 0
    """All bytes that this rank sent, as client and as server: heads, answers and first values too."""
    held_seconds: float = 0.0
    """Sum of the times that complete requests waited for their turn."""
    dropped: int = 0
    """Number of pushes that were dropped as stale, of tensors that this rank leads."""
    scaled: int = 0
    """Number of pushes that were weighted by their staleness, of tensors that this rank leads."""
    incomplete: int = 0
    """Number of steps with fewer pushes than the consistency asks for, of tensors that this rank leads.

    The other workers had left or died, or waited at a barrier.
    """
    rows: int = 0
    """Number of rows in its parts of tables, now."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of applied pushes by staleness, in versions, of tensors that this rank leads."""

    def as_metrics(self) -> dict[str, float]:
        """Return the numbers by the names of `docs/metrics.md`."""
        return {
            "aiodist_ps_pushes_total": self.pushes,
            "aiodist_ps_pulls_total": self.pulls,
            "aiodist_ps_push_bytes_total": self.push_bytes,
            "aiodist_ps_pull_bytes_total": self.pull_bytes,
            "aiodist_ps_push_seconds_total": self.push_seconds,
            "aiodist_ps_pull_seconds_total": self.pull_seconds,
            "aiodist_ps_applied_pushes_total": self.staleness.total(),
            "aiodist_ps_dropped_pushes_total": self.dropped,
            "aiodist_ps_served_reads_total": self.served,
            "aiodist_ps_staleness_versions_total": sum(age * count for age, count in self.staleness.items()),
        }
