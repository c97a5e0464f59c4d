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
ps           pushes and pulls, small pushes a second
ps_ways      our parameter server, torch's RPC, plain Send and Recv, with the same calls
ps_serving   what it costs a training step that its rank also serves
tuning       `aiodist tune`: what is to be measured, and the ranks for it
tuning_worker  what each of them runs: measures all implementations, writes the selector's table
gpu          `aiodist bench gpu`: jobs of ranks on a CUDA device, and what becomes of them
gpu_cases    what they measure and the speeds to reach; gpu_worker, what each rank runs; gpu_notes, what it has to say
gpu_turns    what the cases share; gpu_waits, gpu_reductions, gpu_training: the cases; gpu_report: table and JSON
records      one measured thing, and its JSON
targets      the speeds to reach
report       tables and plots
"""
