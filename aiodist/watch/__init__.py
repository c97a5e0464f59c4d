"""What is seen and done of ranks while a job runs: a trace on one clock, for whom they wait, recovery."""
