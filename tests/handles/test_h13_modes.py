"""H13: torch's modes are the task's."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import ref

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

import aiodist
from aiodist.streams import Modes
from aiodist.testing.seams.world import isolate
from aiodist.world import isolation
from tests.support.hearing import heard

pytestmark = pytest.mark.timeout(30)


class Counting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "no_inference": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "autocast_off": lambda: torch.autocast("cpu", dtype=torch.float16, enabled=False),
    "device": lambda: torch.device("meta"),
    "function_mode": Counting,
}


def seen() -> tuple[object, ...]:
    """All that torch says of its modes."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_device(),
        torch._C._len_torch_function_stack(),
    )


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = seen()
    yield
    assert seen() == before


@pytest.fixture
async def isolated(unchanged: None) -> asyncio.AbstractEventLoop:
    loop = asyncio.get_running_loop()
    isolate(loop)
    return loop


class Turns:
    """Tasks that run one step each time the test says so."""

    def __init__(self, until: Any) -> None:
        self.until = until
        self.gates: dict[str, asyncio.Event] = {}

    async def turn(self, name: str) -> None:
        gate = self.gates[name] = asyncio.Event()
        await gate.wait()

    async def let(self, name: str) -> None:
        await self.until(lambda: name in self.gates)
        self.gates.pop(name).set()
        for _ in range(4):
            await asyncio.sleep(0)


@pytest.mark.usefixtures("isolated")
async def test_h13_no_grad_in_one_task_leaves_the_graph_of_another() -> None:
    w = torch.ones(2, requires_grad=True)
    entered, trained = asyncio.Event(), asyncio.Event()

    async def evaluate() -> bool:
        with torch.no_grad():
            entered.set()
            await trained.wait()
            return (w * 2).requires_grad

    async def train() -> bool:
        await entered.wait()
        loss = (w * 2).sum()
        trained.set()
        return loss.requires_grad

    assert await asyncio.gather(*map(asyncio.create_task, (evaluate(), train()))) == [False, True]


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("second", BLOCKS)
@pytest.mark.parametrize("first", BLOCKS)
async def test_h13_blocks_that_overlap_without_nesting(first: str, second: str, until: Any) -> None:
    """A enters, B enters, A leaves, B leaves: each sees its own at every moment."""
    base = seen()
    turns = Turns(until)

    async def task(name: str, block: str) -> None:
        with BLOCKS[block]():
            alone = seen()
        with BLOCKS[block]():
            await turns.turn(name)
            assert seen() == alone
            await turns.turn(name)
            assert seen() == alone
        assert seen() == base
        await turns.turn(name)
        assert seen() == base

    tasks = [asyncio.create_task(task("a", first)), asyncio.create_task(task("b", second))]
    for name in "abababab"[:6]:
        await turns.let(name)
        assert seen() == base
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks)
    assert seen() == base


programs = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["pop", "step", "spawn", *BLOCKS])), min_size=1, max_size=25
)


class Actor:
    """Enters and leaves blocks at the test's commands, and notes the modes that it sees."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.stack = ExitStack()
        self.orders: asyncio.Queue[str | None] = asyncio.Queue()

    def act(self, action: str) -> None:
        if action == "pop":
            _pop(self.stack)
        elif action in BLOCKS:
            self.stack.enter_context(BLOCKS[action]())
        self.log.append(seen())

    async def obey(self, done: asyncio.Semaphore) -> None:
        with self.stack:
            while (action := await self.orders.get()) is not None:
                self.act(action)
                if action == "spawn":
                    self.log[-1] = await asyncio.create_task(_look())
                done.release()


async def _interleaved(program: list[tuple[int, str]]) -> list[list[object]]:
    done = asyncio.Semaphore(0)
    actors = [Actor() for _ in range(3)]
    tasks = [asyncio.create_task(actor.obey(done)) for actor in actors]
    for who, action in program:
        actors[who].orders.put_nowait(action)
        await done.acquire()
    for actor in actors:
        actor.orders.put_nowait(None)
    await asyncio.gather(*tasks)
    return [actor.log for actor in actors]


@given(programs)
def test_h13_agrees_with_one_thread_per_task(program: list[tuple[int, str]]) -> None:
    """Three tasks run blocks in any interleaving; each sees what it would see on a thread of its own."""
    with asyncio.Runner() as runner:
        isolate(runner.get_loop())
        logs = runner.run(asyncio.wait_for(_interleaved(program), 20))
    for who, log in enumerate(logs):
        alone = Actor()
        with alone.stack:
            for actor, action in program:
                if actor == who:
                    alone.act(action)
        assert log == alone.log


def _pop(stack: ExitStack) -> None:
    rest = list(stack.pop_all()._exit_callbacks)  # type: ignore[attr-defined]
    if rest:
        rest.pop()[1](None, None, None)
    stack._exit_callbacks.extend(rest)  # type: ignore[attr-defined]


async def _look() -> object:
    await asyncio.sleep(0)
    return seen()


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("block", BLOCKS)
async def test_h13_a_task_begins_with_the_modes_of_its_creator(block: str) -> None:
    base = seen()
    with BLOCKS[block]():
        inside = seen()

    async def parent() -> tuple[object, asyncio.Task[object]]:
        with BLOCKS[block]():
            child = asyncio.create_task(_look())
        return seen(), child

    after, child = await asyncio.create_task(parent())
    assert after == base
    assert await child == inside
    assert seen() == base


@pytest.mark.usefixtures("isolated")
async def test_h13_modes_set_for_good_are_the_tasks_own() -> None:
    async def careless() -> object:
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)
        await asyncio.sleep(0)
        return seen()[0], seen()[2], seen()[5]

    base = seen()
    assert await asyncio.create_task(careless()) == (False, True, torch.device("meta"))
    assert seen() == base


@pytest.mark.usefixtures("isolated")
async def test_h13_set_default_device_can_be_undone_a_step_later() -> None:
    async def task() -> object:
        torch.set_default_device("meta")
        await asyncio.sleep(0)
        there = torch.empty(1).device.type
        torch.set_default_device(None)
        await asyncio.sleep(0)
        return there, torch.empty(1).device.type

    assert await asyncio.gather(*[asyncio.create_task(task()) for _ in range(2)]) == [("meta", "cpu")] * 2


@pytest.mark.usefixtures("isolated")
async def test_h13_an_inference_block_left_open_by_a_task_that_ended() -> None:
    """A service may open it in one task and close it in another."""
    base = seen()
    block = torch.inference_mode()

    async def start() -> None:
        block.__enter__()
        await asyncio.sleep(0)

    async def stop() -> None:
        block.__exit__(None, None, None)

    await asyncio.create_task(start())
    assert seen() == base
    await asyncio.create_task(stop())
    assert seen() == base


@pytest.mark.usefixtures("isolated")
async def test_h13_callbacks_outside_tasks_run_in_the_modes_of_the_thread(until: Any) -> None:
    base, inside = seen(), []
    loop = asyncio.get_running_loop()

    async def task() -> None:
        with torch.no_grad():
            loop.call_soon(lambda: inside.append(seen()))
            loop.call_later(0.001, lambda: inside.append(seen()))
            await until(lambda: len(inside) == 2)

    await asyncio.create_task(task())
    assert inside == [base, base]


def test_h13_a_program_inside_a_block_runs_in_it() -> None:
    async def main() -> None:
        assert not torch.is_grad_enabled()

        async def train() -> None:
            with torch.enable_grad():
                await asyncio.sleep(0)
                assert torch.is_grad_enabled()
            assert not torch.is_grad_enabled()

        await asyncio.gather(train(), _look())

    with torch.no_grad(), asyncio.Runner() as runner:
        isolate(runner.get_loop())
        runner.run(main())
        assert not torch.is_grad_enabled()


@pytest.mark.usefixtures("isolated")
async def test_h13_autocast_serves_nobody_casts_of_another_task() -> None:
    """Torch keeps the casts of weights in one table for the process; between two steps the weights may change."""
    w = torch.nn.Parameter(torch.ones(2, 2))
    x = torch.ones(2, 2)
    cast, changed = asyncio.Event(), asyncio.Event()

    async def evaluate() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (x @ w)[0, 0] == 2
            cast.set()
            await changed.wait()

    async def train() -> object:
        await cast.wait()
        with torch.no_grad():
            w.fill_(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = (x @ w)[0, 0].item()
        changed.set()
        return y

    _, y = await asyncio.gather(*map(asyncio.create_task, (evaluate(), train())))
    assert y == 6


@pytest.mark.usefixtures("isolated")
async def test_h13_modes_hold_through_cancellation_and_cleanup() -> None:
    base, inside = seen(), []

    async def task() -> None:
        with torch.no_grad(), torch.device("meta"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                inside.append((torch.is_grad_enabled(), torch.empty(1).device.type))
                raise
            finally:
                inside.append((torch.is_grad_enabled(), torch.empty(1).device.type))

    running = asyncio.create_task(task())
    await asyncio.sleep(0)
    running.cancel("enough")
    with pytest.raises(asyncio.CancelledError) as caught:
        await running
    assert caught.value.args == ("enough",)
    assert inside == [(False, "meta")] * 2
    assert seen() == base


@pytest.mark.usefixtures("isolated")
async def test_h13_cancelled_before_the_first_step() -> None:
    ran = []

    async def task() -> None:
        ran.append(1)

    running = asyncio.create_task(task())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not ran


@pytest.mark.usefixtures("isolated")
async def test_h13_errors_and_results_pass() -> None:
    async def fail() -> None:
        with torch.inference_mode():
            await asyncio.sleep(0)
            raise LookupError("mine")

    async def stop() -> None:
        raise StopIteration

    with pytest.raises(LookupError, match="mine") as caught:
        await asyncio.create_task(fail())
    assert caught.traceback[-1].name == "fail"
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.create_task(stop())
    assert await asyncio.create_task(asyncio.sleep(0, "x")) == "x"
    assert not torch.is_inference_mode_enabled()


@pytest.mark.usefixtures("isolated")
async def test_h13_a_task_looks_as_it_did() -> None:
    async def quiet_work() -> tuple[object, ...]:
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        coro: Any = task.get_coro()
        return task.get_name(), coro.__qualname__, coro.cr_code.co_name, coro.cr_running, repr(task)

    before = asyncio.create_task(quiet_work(), name="named")
    coro: Any = before.get_coro()
    assert inspect.getcoroutinestate(coro) == inspect.CORO_CREATED
    assert coro.cr_frame.f_code.co_name == "quiet_work"
    assert inspect.isawaitable(coro)
    assert asyncio.iscoroutine(coro)
    assert "quiet_work() running at" in repr(before)
    assert __file__ in repr(before)
    assert isinstance(before.get_coro(), Coroutine)
    await asyncio.sleep(0)
    assert inspect.getcoroutinestate(coro) == inspect.CORO_SUSPENDED
    assert before.get_stack()[0].f_code.co_name == "quiet_work"
    name, qualname, code, running, text = await before
    assert (name, code, running) == ("named", "quiet_work", True)
    assert str(qualname).endswith("quiet_work")
    assert "quiet_work() running at" in str(text)
    assert inspect.getcoroutinestate(coro) == inspect.CORO_CLOSED


@pytest.mark.usefixtures("isolated")
async def test_h13_context_variables_and_explicit_contexts() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    context = contextvars.copy_context()
    context.run(variable.set, "given")

    async def get() -> str:
        return variable.get()

    assert await asyncio.create_task(get(), context=context) == "given"


@pytest.mark.usefixtures("isolated")
async def test_h13_groups_and_anyio() -> None:
    base, inside = seen(), []

    async def evaluate() -> None:
        with torch.no_grad():
            await anyio.lowlevel.checkpoint()
            inside.append(torch.is_grad_enabled())

    async with asyncio.TaskGroup() as group:
        group.create_task(evaluate())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(evaluate)
        with anyio.move_on_after(0.001):
            with torch.inference_mode():
                await anyio.sleep_forever()
    assert inside == [False, False]
    assert seen() == base


async def test_h13_isolating_twice_and_over_another_factory() -> None:
    loop = asyncio.get_running_loop()
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coro.__qualname__)
        return asyncio.Task(coro, loop=loop, **options)

    loop.set_task_factory(factory)
    isolate(loop)
    first = loop.get_task_factory()
    isolate(loop)
    assert loop.get_task_factory() is first

    async def evaluate() -> bool:
        with torch.no_grad():
            await asyncio.sleep(0)
        return True

    assert await asyncio.create_task(evaluate())
    assert len(made) == 1
    assert made[0].endswith("evaluate")
    # The program wraps our factory in its own, and ours wraps that one again.
    inner = loop.get_task_factory()
    loop.set_task_factory(lambda loop, coro, **options: inner(loop, coro, **options))  # type: ignore[misc]
    isolate(loop)
    assert await asyncio.create_task(evaluate())
    assert len(made) == 2


@pytest.mark.usefixtures("isolated")
async def test_h13_what_is_no_coroutine_is_refused_as_ever() -> None:
    with pytest.raises(TypeError, match="a coroutine was expected"):
        asyncio.get_running_loop().create_task(lambda: None)  # type: ignore[arg-type]


def test_h13_factory_options_reach_the_previous_factory() -> None:
    """Python 3.12 hands `eager_start` to task factories, and later ones `name`."""
    loop = asyncio.new_event_loop()
    given: list[dict[str, Any]] = []

    def factory(loop: Any, coro: Any, **options: Any) -> Any:
        given.append(options)
        coro.close()

    loop.set_task_factory(factory)
    isolate(loop)
    made: Any = loop.get_task_factory()
    made(loop, _look(), eager_start=True, name="x")
    assert given == [{"eager_start": True, "name": "x"}]
    loop.close()


@pytest.mark.usefixtures("isolated")
async def test_h13_closed_while_suspended() -> None:
    """The interpreter closes tasks of a loop that is gone: their blocks are left in their own modes."""
    inside: list[object] = []

    async def task() -> None:
        with torch.no_grad(), torch.inference_mode():
            try:
                await asyncio.Event().wait()
            finally:
                inside.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    base = seen()
    running = asyncio.create_task(task())
    await asyncio.sleep(0)
    coro: Any = running.get_coro()
    closed_on = threading.Thread(target=coro.close)
    closed_on.start()
    closed_on.join()
    assert inside == [(False, True)]
    assert seen() == base
    running.cancel()
    await asyncio.wait([running])


async def test_h13_a_coroutine_that_never_ran_still_warns(isolated: asyncio.AbstractEventLoop) -> None:
    def factory(loop: Any, coro: Any, **options: Any) -> None:
        del coro

    isolated.set_task_factory(factory)  # type: ignore[arg-type]
    isolate(isolated)
    with heard() as caught:
        isolated.create_task(_look())
    assert [str(w.message) for w in caught] == ["coroutine '_look' was never awaited"]
    isolated.set_task_factory(None)


@pytest.mark.usefixtures("isolated")
async def test_h13_a_cancelled_task_leaves_no_cycle() -> None:
    class Local:
        pass

    gone: list[ref[Local]] = []

    async def task() -> None:
        local = Local()
        gone.append(ref(local))
        await asyncio.Event().wait()

    running = asyncio.create_task(task())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    del running
    await asyncio.sleep(0)
    assert gone[0]() is None


async def test_h13_costs_little(isolated: asyncio.AbstractEventLoop) -> None:
    async def steps(count: int) -> float:
        began = time.thread_time()  # what others do meanwhile is not ours
        for _ in range(count):
            await asyncio.sleep(0)
        return (time.thread_time() - began) / count

    with_ours = min([await isolated.create_task(steps(500)) for _ in range(20)])
    isolated.set_task_factory(None)
    without = min([await isolated.create_task(steps(500)) for _ in range(20)])
    assert with_ours - without < 10e-6  # 0.7 us on a machine with nothing else to do


def test_h13_modes_applied_to_another_thread() -> None:
    with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", dtype=torch.float16):
        modes, here = Modes.capture(), seen()
    there: list[object] = []

    def work() -> None:
        base = seen()
        with modes.applied():
            there.append(seen())
            torch.set_grad_enabled(True)
        there.append(seen() == base)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert there == [here, True]


# --- loops that others started ---------------------------------------------------------------------------------------


async def has_graph_beside_no_grad() -> bool:
    """Return what `test_h13_no_grad_in_one_task_leaves_the_graph_of_another` compares."""
    entered, trained = asyncio.Event(), asyncio.Event()

    async def evaluate() -> None:
        with torch.no_grad():
            entered.set()
            await trained.wait()

    async def train() -> bool:
        await entered.wait()
        trained.set()
        return (torch.ones(1, requires_grad=True) * 2).requires_grad

    return (await asyncio.gather(evaluate(), train()))[1]


@pytest.mark.parametrize("way", ["init", "open", "two"])
def test_h13_a_world_isolates_the_tasks_of_its_loop_while_it_is_open(way: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert not await has_graph_beside_no_grad()
        if way == "open":
            coll = await aiodist.open()
            assert await has_graph_beside_no_grad()
            await coll.aclose()
        else:
            async with aiodist.init():
                assert await has_graph_beside_no_grad()
                if way == "two":
                    with isolation.isolated():
                        pass
                assert await has_graph_beside_no_grad()
        assert loop.get_task_factory() is None
        assert torch.is_grad_enabled()

    asyncio.run(main())


@pytest.mark.parametrize("before", [True, False])
def test_h13_a_world_respects_the_factory_of_the_program(before: bool) -> None:
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coro.__qualname__)
        return asyncio.Task(coro, loop=loop, **options)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        if before:
            loop.set_task_factory(factory)
        async with aiodist.init():
            if before:
                made.clear()
                assert await has_graph_beside_no_grad()
                assert len(made) == 2
            else:
                loop.set_task_factory(factory)
        assert loop.get_task_factory() is factory

    asyncio.run(main())


@pytest.mark.parametrize("lasting", [True, False])
def test_h13_a_task_that_began_before_the_world_is_named(lasting: bool) -> None:
    async def evaluate() -> None:
        await asyncio.Event().wait()

    async def main() -> list[str]:
        if lasting:
            isolate(asyncio.get_running_loop())
        early = asyncio.create_task(evaluate(), name="early")
        await asyncio.sleep(0)
        with heard() as caught:
            async with aiodist.init():
                pass
        early.cancel()
        return [str(w.message) for w in caught if w.category is RuntimeWarning]

    messages = asyncio.run(main())
    if lasting:
        assert not messages
    else:
        (message,) = messages
        line = inspect.getsourcelines(evaluate)[1] + 1
        assert message.startswith("task 'early' (")
        assert f"test_h13_modes.py:{line})" in message
        assert "aiodist.run(main)" in message


@pytest.mark.parametrize("way", ["task", "gather", "wait_for", "asyncio group", "anyio group"])
def test_h13_a_task_that_waits_for_the_world_shares_no_modes_with_it(way: str) -> None:
    async def world() -> None:
        async with aiodist.init():
            pass

    async def main() -> None:
        match way:
            case "task":
                await asyncio.create_task(world())
            case "gather":
                await asyncio.gather(world())
            case "wait_for":
                await asyncio.wait_for(world(), 20)
            case "asyncio group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(world())
            case _:
                async with anyio.create_task_group() as several:
                    several.start_soon(world)

    async def outer() -> None:
        await asyncio.create_task(main())

    with heard() as caught:
        asyncio.run(outer())
    assert not caught
