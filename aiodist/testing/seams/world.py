"""A rank's place in its job, and the world that it opens."""

from aiodist.env import Environment, Starter, servers
from aiodist.world.isolation import isolate
from aiodist.world.opening import Limits, current_place, place_on
from aiodist.world.runtime import opened

__all__ = ["Environment", "Limits", "Starter", "current_place", "isolate", "opened", "place_on", "servers"]
