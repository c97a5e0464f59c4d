"""The parameter server: tensors on servers, in shards; every call returns a handle.

Programs open a `ParameterServer`. In the order of reading: `wire` and `coalescer` (entries between ranks), `names`
(names, and the places of tensors), `requests` and `client` (calls), `server` and `shard` (their execution), `machines`
(the rules of consistency, pure), `rules` and `optimizers`; `training` is on top.
"""

from aiodist.ps.embedding import Embedding
from aiodist.ps.optimizers import SGD, Adagrad, Adam, RMSprop, optimizer
from aiodist.ps.parameter_server import ParameterServer
from aiodist.ps.policies import Asynchronous, Bounded, Policy, Quorum, Synchronous, inverse_age
from aiodist.ps.rows import Constant, Normal, Uniform
from aiodist.ps.rules import Rule
from aiodist.ps.settings import roles_of
from aiodist.ps.statistics import ParameterServerStatistics
from aiodist.ps.table import Table
from aiodist.ps.training import EAMSGD, EASGD, AsySGInCon, Downpour, Schedule, elastic_alpha

__all__ = [
    "EAMSGD",
    "EASGD",
    "SGD",
    "Adagrad",
    "Adam",
    "AsySGInCon",
    "Asynchronous",
    "Bounded",
    "Constant",
    "Downpour",
    "Embedding",
    "Normal",
    "ParameterServer",
    "ParameterServerStatistics",
    "Policy",
    "Quorum",
    "RMSprop",
    "Rule",
    "Schedule",
    "Synchronous",
    "Table",
    "Uniform",
    "elastic_alpha",
    "inverse_age",
    "optimizer",
    "roles_of",
]
