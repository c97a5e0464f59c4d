"""Measures operations beside plain library calls in the same processes; `aiodist bench` is its command line.

plan         what is to be measured: pure data, from the command line to the ranks
registry     the benchmarks by name
cli          the command: checks the plan, starts the ranks
worker       what each rank runs
session      what a benchmark is given: a communicator, the peers, a barrier
timing       contenders in turn, and what their samples say
peers        mpi4py and torch.distributed, called as their users call them
collectives  every operation by size
awaits       what waiting costs
tuning       `aiodist tune`: what is to be measured, and the ranks for it
tuning_worker  what each of them runs: measures all implementations, writes the selector's table
records      one measured thing, and its JSON
targets      the speeds to reach
report       tables and plots
"""
