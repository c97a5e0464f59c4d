"""C10: the ranks compare more than the arguments of a call, if an interface requires more of them."""

from __future__ import annotations

import pytest
import torch

from aiodist import Communicator, MismatchError
from aiodist.communicator import parts_of
from aiodist.communicator.fingerprint import Fingerprint


@pytest.mark.ranks(2, backend=("openmpi", "shm"))
async def test_c10_an_allreduce_that_the_core_knows_is_compared_by_the_given_fingerprint(coll: Communicator) -> None:
    t = torch.ones(3)
    await coll.allreduce(t)
    with pytest.raises(MismatchError, match="of rank 0"):
        await parts_of(coll).comparing(Fingerprint(f"of rank {coll.rank}")).allreduce(t)
    assert await coll.allreduce(torch.ones(3)) is not None
