"""The machine's MPI: which are installed, and the commands that start ranks."""

from aiodist.launch.commands import Flavour, Job, Mpi, elastic_range, mpirun_environment
from aiodist.launch.discover import command_of, find_mpi, probe

__all__ = ["Flavour", "Job", "Mpi", "command_of", "elastic_range", "find_mpi", "mpirun_environment", "probe"]
