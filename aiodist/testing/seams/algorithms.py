"""Programs of collectives, run step by step on any endpoint."""

from aiodist.collectives.implementations import NativeCollectives, Repertoire
from aiodist.collectives.program import Endpoint, Implementation, Program, lockstep, run
from aiodist.collectives.scheduled import Scheduled

__all__ = ["Endpoint", "Implementation", "NativeCollectives", "Program", "Repertoire", "Scheduled", "lockstep", "run"]
