"""Monitors the ranks of a running job by traces, late ranks, deadlocks and `aiodist inspect`."""
