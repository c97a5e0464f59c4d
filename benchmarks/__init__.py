"""Benchmarks that compare aiodist with torch's DDP and RPC, mpi4py and gloo, and a simulator of large machines.

`python -m benchmarks NAME`, in the root of the repository; `aiodist bench` measures single operations.

suite        the benchmarks with the options of `aiodist bench`, by name; worker: a rank; figures: their records
bits         reproducible sums, over the usual ones
reductions   collectives by size, and a copy
results      the table of ratios; tails: the table of slow ends, over several runs
targets, await_targets  their targets; verdicts: the table of figures and targets
training     a training step, DDP, and a loop without communication; models; threads: the CPU time of each
checkpointing  a checkpoint during training steps
prefetching  an epoch with a loader as slow as its step
reading      records from a file on disk, and plain reads
ps           pushes and pulls, small pushes a second
ps_ways      our parameter server, torch's RPC, plain Send and Recv, with the same calls
ps_serving   the cost of serving for a training step on the same rank
ps_saving    a checkpoint of a server during pushes; a program for `aiodist run`
ps_rows      rows of a table, and a plain tensor; a program for `aiodist run`
ps_convergence  training with rare exchanges with the server
gpu          the cases on a CUDA device and their targets, each a job of ranks; gpu_turns: what the cases share;
             gpu_waits, gpu_reductions, gpu_training: the cases
scale        collectives on large machines, simulated: scale_model, loggp
"""
