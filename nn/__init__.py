"""Training on many ranks: gradients reduced while backward goes on, and what belongs to it."""

from aiodist.nn.data_parallel import DataParallel
from aiodist.nn.pipelined import PipelinedOptimizer
from aiodist.nn.reducer import Statistics
from aiodist.nn.synchronize import assert_synchronized, synchronize_gradients, synchronize_parameters

__all__ = [
    "DataParallel",
    "PipelinedOptimizer",
    "Statistics",
    "assert_synchronized",
    "synchronize_gradients",
    "synchronize_parameters",
]
