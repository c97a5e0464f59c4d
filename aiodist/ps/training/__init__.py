"""Training against a parameter server: clients that say when to push and pull, for any of torch's optimizers."""

from aiodist.ps.training.downpour import AsySGInCon, Downpour
from aiodist.ps.training.elastic import EAMSGD, EASGD
from aiodist.ps.training.schedule import Schedule, elastic_alpha

__all__ = ["EAMSGD", "EASGD", "AsySGInCon", "Downpour", "Schedule", "elastic_alpha"]
