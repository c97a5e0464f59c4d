"""Programs of collectives, run step by step on any endpoint."""

from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.collectives.implementations import NativeCollectives, Repertoire
from aiodist.collectives.scheduled import Scheduled
from aiodist.handles.kernel import Program

__all__ = [
    "Endpoint",
    "Implementation",
    "NativeCollectives",
    "Program",
    "Repertoire",
    "Scheduled",
]
