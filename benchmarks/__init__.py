"""Our proofs: training, jobs and a parameter server against torch's DDP and RPC, a GPU, and simulated machines.

`python -m benchmarks NAME`, in the root of the repository; `aiodist bench` measures single operations.

suite        what takes the options of `aiodist bench`, by name
targets      the speeds to reach
collectives  ordinary and arena tensors beside MPI, gloo and shm_c, DeepSpeed's allreduce rebuilt in C
training     a step beside DDP and beside no communication; models: what is trained; threads: the CPU of each
checkpointing  a checkpoint beside steps
prefetching  an epoch whose loader is as slow as its step
reading      records from a file on disk, beside plain reads of it
endtoend     a whole job beside the same with DDP: jobs, jobs_aiodist, jobs_ddp
ps           pushes and pulls, small pushes a second
ps_ways      our parameter server, torch's RPC, plain Send and Recv, with the same calls
ps_serving   what it costs a training step that its rank also serves
ps_saving    a checkpoint of a server while pushes go on; a program for `aiodist run`
ps_rows      rows of a table beside a plain tensor; a program for `aiodist run`
ps_convergence  what training clients find when they talk to the server seldom
gpu          the cases on a CUDA device and their targets, each a job of ranks; gpu_turns: what the cases share;
             gpu_waits, gpu_reductions, gpu_training: the cases
scale        collectives on large machines, simulated: scale_model, loggp
"""
