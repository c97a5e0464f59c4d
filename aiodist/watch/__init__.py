"""Monitoring of ranks while a job runs: traces, who waits for whom, deadlocks, inspect."""
