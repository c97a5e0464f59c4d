"""docs/debug.md: each quoted text is an output of aiodist, each exception has a section, and errors name it."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aiodist import cli, errors
from tests.support.nursed import stub

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "debug.md"
QUOTED = re.compile(r"^> `(.*)`$", re.MULTILINE)
HEAD = """import asyncio, contextlib, os, pathlib, signal, warnings, torch, aiodist
t = torch.ones(4)
def damage():
    for path in pathlib.Path("saved").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
"""
ONE = """
async def main():
    async with aiodist.init() as coll:
        {body}
    {after}
try:
    aiodist.run(main)
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
"""
BOTH = """
async def main():
    async with aiodist.init() as coll:
        {body}
        await coll.barrier()
aiodist.run(main)
"""
ALONE = {
    "BufferInFlight": "h = coll.recv(t, src=0); coll.send(t, 0)",
    "BackendError": "h = coll.recv(torch.ones(2), src=0); await coll.send(t, 0); await h",
    "BackendUnavailable": "await coll.allreduce(t, impl='nccl')",
    "CheckpointDamaged": "net = torch.nn.Linear(4, 1); await aiodist.save('saved', net, coll=coll); damage(); "
    "await aiodist.load('saved', net, coll=coll)",
    "CommunicatorAborted": "own = await coll.dup(); own.abort('the data are broken'); await own.allreduce(t)",
    "RuntimeError: communicator": "await asyncio.to_thread(coll.allreduce, t)",
    "ValueError": "await coll.allreduce(torch.ones(4, 4).t())",
    "AttributeError: no": "aiodist.init().allreduce(t)",
    "AttributeError: 'Comm": "coll.all_reduce(t)",
    "TypeError: mean": "await coll.allreduce(torch.ones(3, dtype=torch.int32), op='mean')",
    "TypeError: t holds": "await coll.allreduce(torch.ones(3, dtype=torch.uint16))",
    "TypeError: DataParallel": "aiodist.nn.DataParallel(torch.nn.Linear(4, 1), coll)",
    "RuntimeError: recv": "await asyncio.to_thread(asyncio.run, asyncio.wait_for(coll.recv(t, src=0), 1))",
    "RuntimeWarning": "coll.allreduce(t); await asyncio.sleep(0.5)",
    "ResourceWarning": "warnings.simplefilter('default', ResourceWarning); await coll.dup()",
    "RuntimeError: run": "aiodist.run(main)",
    "RuntimeError: wait": "coll.allreduce(t).wait()",
    "InvalidStateError": "coll.recv(torch.ones(4), src=0).result()",
    "RuntimeError: parameter": "(await aiodist.nn.DataParallel.create(torch.nn.Linear(4, 1), coll))(t).backward()",
}
AFTER = {
    "CommunicatorClosed": "await coll.allreduce(t)",
    "ConfigError": "os.environ['AIODIST_SHM'] = 'maybe'; await aiodist.open()",
}
LIMIT = {"aiodist: 40 ranks": 'ulimit -n 60; exec "$@"'}
"""Commands of a shell before it starts 40 ranks."""
TWO = {
    "CommunicatorError": "await (await coll.group([0])).allreduce(t)",
    "MismatchAborted": "for _ in range(4):\n"
    "            with contextlib.suppress(aiodist.MismatchError if _ < 3 else ()):\n"
    "                await coll.allreduce(t, op='sum' if coll.rank else 'max')",
    "MismatchError: ranks": "await coll.allreduce(t, op='sum' if coll.rank else 'max')",
    "MismatchError: rank 1": "coll.rank or await coll.send(t[:3], dst=1, tag=7)",
    "OperationTimeout": "await asyncio.sleep(3 * coll.rank); await coll.allreduce(t, timeout=1)",
    "DeadlockError": "await coll.recv(t, src=1 - coll.rank)",
    "RemoteError": "if coll.rank: raise ValueError('broken')",
    "PeerLost": "coll.rank and os.kill(os.getpid(), signal.SIGKILL)",
}


def quoted() -> list[str]:
    return QUOTED.findall(PAGE.read_text(encoding="utf-8"))


def said(nursery: str, folder: Path, program: str, *start: str) -> str:
    (folder / "program.py").write_text(HEAD + program)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, *start, *stub(nursery, "program.py")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NURSERY_ENDS": "soon"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.stdout


def is_said(text: str, output: str) -> bool:
    return re.search(".*".join(map(re.escape, text.split("…"))), output) is not None


def test_t4_each_question_has_its_program() -> None:
    starts = [*ALONE, *TWO, *AFTER, *LIMIT]
    assert len(starts) == len(quoted())
    assert all(sum(text.startswith(start) for start in starts) == 1 for text in quoted())


def test_t4_one_rank_says_what_the_page_quotes(nursery: str, tmp_path: Path) -> None:
    programs = [ONE.format(body=body, after="") for body in ALONE.values()]
    programs += [ONE.format(body="pass", after=after) for after in AFTER.values()]
    output = said(nursery, tmp_path, "".join(programs))
    assert [text for text in quoted() if not text.startswith((*TWO, *LIMIT)) and not is_said(text, output)] == [], (
        output
    )


@pytest.mark.thorough
@pytest.mark.parametrize("start", TWO)
def test_t4_two_ranks_say_what_the_page_quotes(nursery: str, start: str, tmp_path: Path) -> None:
    [text] = [text for text in quoted() if text.startswith(start)]
    output = said(nursery, tmp_path, BOTH.format(body=TWO[start]), "-m", "aiodist.cli", "run", "-n", "2")
    assert is_said(text, output), output


@pytest.mark.thorough
def test_t4_the_launcher_says_what_the_page_quotes() -> None:
    [(start, limit)] = LIMIT.items()
    [text] = [text for text in quoted() if text.startswith(start)]
    command = ["bash", "-c", limit, "-", sys.executable, "-m", "aiodist.cli", "run", "-n", "40", "-m", "this"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert is_said(text, ended.stderr), ended.stderr


# --- the sections, and the references to them --------------------------------------------------------------------


def sections() -> dict[str, str]:
    page = PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"^### (\w+)\n(.*?)(?=^#{1,3} |\Z)", page, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", errors.__all__)
def test_t4_each_exception_has_a_section(name: str) -> None:
    text = sections()[name]
    assert len(text.split()) <= 100
    result = CliRunner().invoke(cli.app, ["explain", name.upper()])
    assert result.exit_code == 0
    assert re.search(rf"^\W*{name}\W*$", result.output, re.MULTILINE)
    assert " ".join(text.replace("`", "").split())[:30] in " ".join(result.output.split())


def test_t4_explain_lists_the_names() -> None:
    output = CliRunner().invoke(cli.app, ["explain"]).output
    assert [name for name in errors.__all__ if f"\n{name.lower()} " not in f"\n{output}"] == []


@pytest.mark.parametrize(
    ("name", "meant"), [("mismatch", "mismatcherror"), ("PeerLots", "peerlost"), ("a.b.Deadlock", "deadlockerror")]
)
def test_t4_explain_suggests_the_nearest_name(name: str, meant: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"there is no section '{name}': did you mean {meant}?"):
        CliRunner().invoke(cli.app, ["explain", name], catch_exceptions=False)


def test_t4_explain_takes_the_name_that_a_traceback_has() -> None:
    assert "MismatchError" in CliRunner().invoke(cli.app, ["explain", "aiodist.errors.MismatchError"]).output
    with pytest.raises(errors.ConfigError, match="there is no section 'xyzzy': `aiodist explain` lists all"):
        CliRunner().invoke(cli.app, ["explain", "xyzzy"], catch_exceptions=False)


POINTED = "see: aiodist explain mismatcherror"


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("again", [lambda e: e, copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_t4_an_error_names_its_section_once(again: Callable[[BaseException], BaseException]) -> None:
    first = errors.MismatchError("ranks disagree")
    first.add_note("and a note")
    error = again(again(first))
    assert str(error) == "ranks disagree"
    assert shown(error) == f"aiodist.errors.MismatchError: ranks disagree\nand a note\n{POINTED}\n"
    with pytest.raises(TypeError, match="note must be a str"):
        error.add_note(1)  # type: ignore[arg-type]


def test_t4_an_error_in_another_ones_text_names_one_section() -> None:
    try:
        try:
            raise errors.MismatchError("ranks disagree")
        except errors.MismatchError as error:
            raise errors.RemoteError(f"rank 1 failed: {error}", raised_by=1) from error
    except errors.RemoteError as error:
        last = shown(error).splitlines()[-2:]
    assert last == [
        "aiodist.errors.RemoteError: rank 1 failed: ranks disagree",
        "see: aiodist explain remoteerror",
    ]


def test_t4_only_errors_of_aiodist_name_a_section() -> None:
    class Special(errors.PeerLost):
        pass

    class Other(errors.AiodistError):
        pass

    assert errors.pointer(Special("gone", lost=1)) == "see: aiodist explain peerlost"
    assert errors.pointer(Other("mine")) == errors.pointer(ValueError("x")) == ""
    assert errors.pointer(errors.AiodistError("x")) == "see: aiodist explain aiodisterror"


CHAIN = BOTH.format(
    body="""try:
            await coll.allreduce(t, op='sum' if coll.rank else 'max')
        except aiodist.MismatchError as error:
            raise aiodist.BackendError("because") from error"""
)


@pytest.mark.thorough
def test_t4_a_rank_prints_one_pointer(nursery: str, tmp_path: Path) -> None:
    """Not that of the cause, nor, at a rank that hears of it, that of the other rank's traceback."""
    output = said(nursery, tmp_path, CHAIN, "-m", "aiodist.cli", "run", "-n", "2", "--no-prefix", "--mpi", "none")
    assert "MismatchError" in output
    assert set(re.findall("see: aiodist explain \\w+", output)) <= {
        "see: aiodist explain backenderror",
        "see: aiodist explain remoteerror",
    }, output
    output = said(
        nursery,
        tmp_path,
        ONE.format(body="raise aiodist.MismatchError('broken')", after="").split("try:")[0] + "aiodist.run(main)",
    )
    assert output.count("see: ") == output.count("\nsee: aiodist explain mismatcherror\n") == 1
