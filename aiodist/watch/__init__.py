"""Monitoring of ranks while a job runs: traces, late ranks, deadlocks, inspect."""
