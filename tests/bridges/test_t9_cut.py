"""T9: the parts that ranks send fill each tensor once, and are copied into memory that is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from aiodist.bridges.cut import StatePart

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)


def joined(parts: list[StatePart], copies: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors that readers put together, after the check that each byte was sent at most once."""
    table = parts[0].table
    block = torch.full((table.nbytes,), 171, dtype=torch.uint8)
    seen = torch.zeros(table.nbytes, dtype=torch.int64)
    for part, runs in zip(parts, copies, strict=True):
        places = part.table.runs(part.extents)
        assert [end - begin for begin, end in places] == [run.numel() for run in runs]
        for (begin, end), run in zip(places, runs, strict=True):
            block[begin:end] = run
            seen[begin:end] += 1
    assert seen.max() <= 1
    return {entry.name.removeprefix("state/"): table.tensor(block, n) for n, entry in enumerate(table.entries)}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_t9_the_shares_of_ranks_fill_each_tensor_once(size: int) -> None:
    generator = torch.Generator().manual_seed(size)

    def state() -> dict[str, torch.Tensor]:
        made = {}
        for number in range(23):
            shape = torch.randint(0, 300 if number % 3 else 40, (1 + number % 3,), generator=generator).tolist()
            t = torch.randn(shape, generator=generator, dtype=torch.float64) * 9
            made[f"t{number}"] = (t.transpose(0, -1) if number % 5 == 4 else t).to(DTYPES[number % len(DTYPES)])
        return made

    blocks: list[list[torch.Tensor]] = [[] for _ in range(size)]
    first = state()
    for values in (first, {name: t.flip(0) for name, t in first.items()}):  # the second one uses the memory again
        parts = [StatePart.of(values, rank, size) for rank in range(size)]
        before = [[block.data_ptr() for block in mine] for mine in blocks]
        got = joined(parts, [part.copy(mine) for part, mine in zip(parts, blocks, strict=True)])
        assert list(got) == list(values)
        assert all(got[name].dtype == t.dtype and torch.equal(got[name], t) for name, t in values.items())
        assert all(not old or old == [b.data_ptr() for b in new] for old, new in zip(before, blocks, strict=True))


@pytest.mark.parametrize("placement", ["rows", "columns", "replicated"])
def test_t9_each_rank_sends_its_part_of_a_dtensor(placement: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = torch.randn(7, 10, dtype=torch.float64)
    placements: Any = {"rows": [Shard(0)], "columns": [Shard(1)], "replicated": [Replicate()]}[placement]
    parts, copies = [], []
    for rank in range(3):
        dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (3,))
            chunks = {"rows": whole.chunk(3, 0), "columns": whole.chunk(3, 1), "replicated": [whole] * 3}[placement]
            t = DTensor.from_local(chunks[rank], mesh, placements, run_check=False, shape=whole.shape, stride=(10, 1))
            parts.append(StatePart.of({"w": t, "b": whole[0]}, rank, 3))
            copies.append(parts[-1].copy([]))
        finally:
            dist.destroy_process_group()
    got = joined(parts, copies)
    assert torch.equal(got["w"].T if placement == "columns" else got["w"], whole)
    assert torch.equal(got["b"], whole[0])
