"""Starts the ranks of a job and watches over them; imports neither torch, numpy nor mpi4py.

`job.run(Job(...))` is what `aiodist run` calls. Every rank runs below a small guard process (`worker`), which
carries its output and the way it ended to the launcher, whether the launcher itself or an mpirun started it.

commands    what to start: pure functions from a `Job` to command lines and environments
hosts       which hosts, and how many ranks each of them has
network     the address at which other hosts reach the launcher
discover    which mpirun there is, of which flavour, and how many ranks `auto` means
wire        frames between launcher and guard
worker      the guard of one rank
ranks       the launcher's end: one connection a rank
processes   the local processes: guards, or one mpirun
output      whole lines with the rank in front
verdict     which rank failed, and when an exit with code 0 is a failure
job         `run`: opens all of these, and ends them
"""
