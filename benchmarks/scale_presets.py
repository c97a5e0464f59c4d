"""Networks by name, for `python -m benchmarks scale`.

The seconds per byte of the two networks are their line rates. The others are rounded figures of the order that the
sources beside them report; they differ from machine to machine, and `python -m benchmarks scale --check` fits those
of the one at hand.
"""

from __future__ import annotations

from benchmarks.loggp import LogGP

__all__ = ["COMBINE", "PRESETS"]

PRESETS = {
    "host": LogGP(latency=0.2e-6, overhead=0.1e-6, gap=0.1e-6, byte_gap=0.12e-9),
    "ethernet25": LogGP(latency=15e-6, overhead=4.5e-6, gap=1e-6, byte_gap=8 / 25e9),
    "infiniband400": LogGP(latency=0.7e-6, overhead=0.2e-6, gap=0.1e-6, byte_gap=8 / 400e9),
}
"""host: ranks of one host through shared memory. A short message takes 0.3 to 0.4 us (D. Buntinas, G. Mercier,
W. Gropp, "Design and evaluation of Nemesis, a scalable, low-latency, message-passing communication subsystem",
CCGrid 2006, https://doi.org/10.1109/CCGRID.2006.31); a long one is copied in and out, by cores that copy 17 GB/s.

ethernet25: 25 Gb/s Ethernet (IEEE 802.3by) under the kernel's TCP, whose way from one program to another takes about
24 us for a short message (A. Belay et al., "IX: a protected dataplane operating system for high throughput and low
latency", OSDI 2014, https://infoscience.epfl.ch/record/201671), mostly spent in the two kernels.

infiniband400: 400 Gb/s InfiniBand, NDR (https://docs.nvidia.com/networking/display/ConnectX7VPI/Introduction), from
user space: about 1 us for a short message of MPI, several million messages a second from one process. How to measure
such figures: T. Hoefler, A. Lichei, W. Rehm, "Low-overhead LogGP parameter assessment for modern interconnection
networks", IPDPS 2007, https://doi.org/10.1109/IPDPS.2007.370593.
"""

COMBINE = 0.1e-9
"""Seconds per byte of a sum in place by one core: it reads two bytes and writes one for each, at about 30 GB/s."""
