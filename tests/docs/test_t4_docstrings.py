"""Each sample in a docstring runs, on one rank, behind what it takes for granted."""

from __future__ import annotations

import ast
import asyncio
import importlib
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import aiodist

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
"""At the margin, or under "Example:"."""
NET = """
net = await aiodist.nn.DataParallel.create(torch.nn.Linear(8, 1), coll)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
"""
SERVER = """
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
ps = await stack.enter_async_context(aiodist.ParameterServer(coll, net))
"""
RECORDS = """
with aiodist.data.RecordWriter("train.rec") as writer:
    writer.write(b"a"), writer.write(b"b")
decode = lambda records: (records, len(records))
"""
EMBEDDING = """
from aiodist.ps import Adagrad
ps = await stack.enter_async_context(aiodist.ParameterServer(coll))
loader = [(torch.randint(0, 99, (4, 8)), torch.randn(4, 2))] * 2
"""
BRIDGE = """
import asyncio
door = await stack.enter_async_context(aiodist.listen("weights"))
accepting = asyncio.ensure_future(door.accept())
bridge = await stack.enter_async_context(aiodist.connect("weights"))
model = torch.nn.Linear(8, 1)
"""
ENDING = """
import asyncio
door = await stack.enter_async_context(aiodist.listen("weights"))
model = torch.nn.Linear(8, 1)
await door.publish(model.state_dict())
async def end():
    await door.accept()
    await door.aclose()
ending = asyncio.ensure_future(end())
"""
NET_METHODS = (
    *("ModuleLike.state_dict", "ModuleLike.load_state_dict"),
    *(f"DataParallel.{name}" for name in ("configure", "step", "submit", "backward", "backward_iter", "no_sync")),
    *("DataParallel.join", "DataParallel.synchronize_buffers"),
)
BEFORE = {
    **dict.fromkeys(
        ("Communicator", *(f"Communicator.{name}" for name in ("breakpoint", "dup", "group", "split"))), ""
    ),
    **{f"Reductions.{name}": "" for name in ("allreduce", "reduce", "reduce_scatter")},
    **{f"Movement.{name}": "" for name in ("broadcast", "allgather", "gather", "scatter", "alltoall", "barrier")},
    **dict.fromkeys(("PointToPoint.send", "PointToPoint.recv"), ""),
    **dict.fromkeys(("Objects.broadcast_object", "Objects.allgather_object"), ""),
    **dict.fromkeys(
        ("Handle", "Handle.wait", "Handle.result", "Handle.cancel", "gather", "as_completed", "timeout"), ""
    ),
    **dict.fromkeys(("ParameterServer.push", "ParameterServer.pull", "Durability.save", "Durability.load"), SERVER),
    "load": NET + "step = 7",
    "save": NET + "step, loader = 7, aiodist.data.ShardQueue(aiodist.data.IndexShards(range(8)), coll, batch_size=4)",
    "ErrorFeedback": "grad = torch.randn(1000)",
    "Outgoing": "worker, weight = 0, torch.randn(1000)",
    "prefetch": NET,
    "RecordWriter": "",
    "records": RECORDS,
    "ShardQueue": NET + "dataset = range(20); load = lambda indices: (indices, indices)",
    "ShardSampler": "dataset = range(20)",
    "WithCriterion": "network, criterion = torch.nn.Linear(8, 1), torch.nn.MSELoss()",
    "Engine": "module = torch.nn.Linear(8, 4); loader = held_out = [(torch.randn(4, 8), torch.arange(4))] * 3",
    "Embedding": EMBEDDING,
    "Embedding.accumulating": EMBEDDING
    + """
words = aiodist.ps.Embedding(await ps.embedding("words", 8, optimizer=Adagrad(lr=0.1)))
net = await aiodist.nn.DataParallel.create(torch.nn.Sequential(words, torch.nn.Linear(8, 1)), coll)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
first = second = lambda: net(torch.tensor([1, 2])).sum()
""",
    "optimizer": "",
    "ParameterServer": "net = torch.nn.Linear(8, 1)",
    "ParameterServer.pushing": SERVER + "loss = net(torch.ones(2, 8)).sum()",
    "Table": EMBEDDING + "ids, gradients = torch.tensor([3, 3]), torch.ones(2, 64)",
    "Downpour": SERVER,
    "AsySGInCon": "net = torch.nn.Linear(8, 1)",
    "EASGD": SERVER + "workers = 1",
    "BlockSequential": "layers = [torch.nn.Linear(8, 8) for _ in range(7)]",
    "DataParallel": "Net = lambda: torch.nn.Linear(8, 1)",
    "DataParallel.create": "",
    **dict.fromkeys(NET_METHODS, NET),
    **dict.fromkeys(("synchronize_parameters", "synchronize_gradients", "assert_synchronized"), ""),
    **dict.fromkeys(("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "full_state_dict"), ""),
    **dict.fromkeys(("Engine.on", "Engine.train", "Engine.test"), NET),
    **dict.fromkeys(("ColumnLinear", "RowLinear", "VocabEmbedding", "SyncBatchNorm"), ""),
    **dict.fromkeys(("LocalSGD", "LocalSGD.create"), NET),
    **dict.fromkeys(("PipelinedOptimizer", "PipelinedOptimizer.create"), NET),
    **dict.fromkeys(("ShardedOptimizer", "ShardedOptimizer.create"), NET),
    "listen": NET,
    "connect": ENDING,
    "Door.accept": BRIDGE.replace("accepting =", "#").replace("bridge =", "other ="),
    "Bridge.send": BRIDGE,
    "Bridge.recv": BRIDGE + "sending = (await accepting).send(torch.ones(3), 0)",
    "Bridge.publish": NET + BRIDGE + "step = 1",
    "Bridge.subscribe": ENDING + 'bridge = await stack.enter_async_context(aiodist.connect("weights"))',
    "HostStream": "step, batch = torch.sum, torch.ones(3)",
}
"""The code before each sample."""
WITHOUT = {"CudaStream"}
"""Samples that need a GPU."""
ALONE = ("init", "open", "run", "start")
"""Samples that are programs."""


def samples() -> Iterator[tuple[str, str, str]]:
    """Yield the module of each, the name in it, and the text."""
    for top in ("aiodist", "handles", "nn", "streams"):
        for path in sorted((ROOT / top).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for name, node in documented(ast.parse(path.read_text(encoding="utf-8")), ""):
                for _, text in SAMPLE.findall(ast.get_docstring(node) or ""):
                    yield module if top == "aiodist" else f"aiodist.{module}", name, dedent(text)


def documented(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield classes and functions by name, methods with the name of their class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from documented(node, f"{node.name}.")


@cache
def known() -> dict[str, tuple[str, list[str]]]:
    """Return the module and the text of each sample."""
    found: dict[str, tuple[str, list[str]]] = {}
    for module, name, text in samples():
        found.setdefault(name, (module, []))[1].append(text)
    return found


def test_t4_each_sample_is_known() -> None:
    assert known().keys() == {*BEFORE, *WITHOUT, *ALONE}


@pytest.mark.drawn(16)
@pytest.mark.parametrize("name", [*BEFORE, *ALONE])
def test_t4_a_sample_in_a_docstring_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, texts = known()[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # where two jobs meet
    if name in ALONE:
        alone = eval(compile(texts[0], name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), {"__name__": "__main__"})
        if alone is not None:
            aiodist.run(alone)
        return

    async def main() -> None:
        async with aiodist.init() as coll, AsyncExitStack() as stack:
            names: dict[str, Any] = {
                **vars(importlib.import_module(module)),
                **vars(aiodist.codecs),
                **{"aiodist": aiodist, "nn": aiodist.nn, "data": aiodist.data, "asyncio": asyncio, "torch": torch},
                **{"DataLoader": DataLoader, "DataParallel": aiodist.nn.DataParallel, "SGD": aiodist.ps.SGD, "F": F},
                **{"coll": coll, "stack": stack, "loss_fn": F.mse_loss, "epochs": 2},
                "batches": [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(3)],
            }
            names["loader"] = names["batches"]
            for part in (BEFORE[name], *texts):
                step = eval(compile(part, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
                if step is not None:
                    await step

    aiodist.run(main)
