"""Bridges: two jobs that meet, exchange messages, and hand over weights; either may end and come back."""

from aiodist.bridges.bridge import Bridge
from aiodist.bridges.opening import Door, connect, listen

__all__ = ["Bridge", "Door", "connect", "listen"]
