"""What is seen and done of ranks while a job runs: traces, for whom they wait, deadlocks, inspect."""
