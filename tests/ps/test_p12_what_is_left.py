"""P12: what a parameter server that failed leaves behind: no communicator, no thread, no tensor."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator, MismatchError, ParameterServer, RemoteError
from aiodist.communicator import parts_of
from aiodist.testing import run_ranks

LARGE = 1 << 18


class Lapse(Exception):
    """The error of a rank."""


def test_p12_a_failure_ends_the_service_thread_and_what_it_holds() -> None:
    """A rank fails while the first of five pushes is applied; no server applies the others, and all memory is free."""
    begun, free = threading.Event(), threading.Event()
    applied: list[int] = []
    kept: list[weakref.ref[Any]] = []

    def rule(shard: torch.Tensor, value: torch.Tensor) -> None:
        applied.append(1)
        begun.set()
        assert free.wait(20)

    async def rank() -> None:
        async with aiodist.init() as coll:
            t = torch.ones(LARGE)
            kept.extend(map(weakref.ref, (coll, t)))
            async with ParameterServer(coll, {"w": t}, rule=rule, servers=[0], workers=[1]) as ps:
                kept.append(weakref.ref(ps))
                if coll.rank == 1:
                    pushes = [ps.push("w", torch.ones(LARGE)) for _ in range(5)]
                    assert await asyncio.to_thread(begun.wait, 20)
                    assert not any(push.done() for push in pushes)
                    raise Lapse
                try:
                    while True:
                        await ps.sync()
                        await asyncio.sleep(0)
                finally:  # this rank has aborted too
                    free.set()

    with pytest.raises(Lapse):
        run_ranks(2, rank)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("aiodist-ps")]
    assert len(applied) == 1
    gc.collect()
    assert [ref() for ref in kept if ref() is not None] == []


@pytest.mark.ranks(2)
async def test_p12_a_finished_pull_keeps_no_tensor(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": torch.ones(9)}) as ps:
        out = torch.zeros(9)
        await ps.pull("w", out)
        ref = weakref.ref(out)
        gc.disable()
        try:
            del out
            assert ref() is None
        finally:
            gc.enable()


@pytest.mark.ranks(2)
async def test_p12_ranks_that_disagree_leave_no_communicator_open(coll: Communicator) -> None:
    ps = ParameterServer(coll, {"w": torch.ones(3)}, split_bytes=64 << coll.rank)
    with pytest.raises(MismatchError, match="split_bytes"):
        await ps.__aenter__()
    assert [open.name for open in parts_of(coll).registry.members.dispatchers] == ["world"]
    await coll.barrier()


@pytest.mark.ranks(2)
async def test_p11_an_error_in_a_save_keeps_its_type(
    coll: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KeyError of the server's own is no tensor that was freed."""

    def no_folder(*_: object) -> None:
        raise KeyError("number")

    monkeypatch.setattr(os, "mkdir", no_folder)
    async with ParameterServer(coll, {"w": torch.ones(3)}) as ps:
        if coll.rank == 1:
            with pytest.raises(RemoteError, match="server 0 raised KeyError: 'number'"):
                await ps.save(tmp_path)
