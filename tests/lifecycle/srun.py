"""Does the work of Slurm's `srun -n N --ntasks-per-node P COMMAND` on one host: N processes with Slurm's variables.

`srun.py N P FIRST_NODE COMMAND...`; the exit code is the highest of theirs. The variables are those that Slurm 23
sets for the tasks of a step; its nodes are this host and others that only have names.
"""

from __future__ import annotations

import os
import subprocess
import sys

OTHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "AIODIST_",
    "OMPI_",
    "PMI",
    "MPI_",
    "SLURM_",
)


def variables(rank: int, tasks: int, per_node: int, first: str, job: str) -> dict[str, str]:
    nodes = -(-tasks // per_node)
    listed = first if nodes == 1 else f"{first},node[2-{nodes}]"
    return {
        "SLURM_JOB_ID": job,
        "SLURM_JOBID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_JOB_NODELIST": listed,
        "SLURM_NODELIST": listed,
        "SLURM_STEP_NODELIST": listed,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
        "SLURMD_NODENAME": first if rank < per_node else f"node{rank // per_node + 1}",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "SLURM_SRUN_COMM_PORT": "1",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }


def main() -> int:
    tasks, per_node, first, *command = sys.argv[1:]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    started = [
        subprocess.Popen(command, env={**clean, **variables(rank, int(tasks), int(per_node), first, str(os.getpid()))})
        for rank in range(int(tasks))
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
