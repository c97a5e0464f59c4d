"""T2: the pytest plugin, as a user's test file meets it."""

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

import aiodist.testing.plugin
import aiodist.testing.ranks  # torch, once and not in each of the runs below

pytest_plugins = ["pytester"]

PLUGIN = aiodist.testing.plugin.__name__
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(request: pytest.FixtureRequest, pytester: pytest.Pytester) -> Run:
    """Run pytest on a file in this process and return what it says."""
    manager = request.config.pluginmanager
    plugin = [] if manager.get_name(sys.modules[PLUGIN]) != PLUGIN else ["-p", PLUGIN]
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")

    def run_pytest(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=source)
        return pytester.runpytest_inprocess(*plugin, "-p", "no:cacheprovider", "-v", *arguments)

    return run_pytest


def test_t2_a_test_runs_once_per_rank(run: Run) -> None:
    result = run("""
        import pytest
        seen = []

        @pytest.mark.ranks(1, 2, 4)
        async def test_sum(coll):
            seen.append((coll.size, coll.rank))
            assert await coll.allreduce(coll.rank) == sum(range(coll.size))

        def test_seen():
            assert sorted(seen) == [(size, rank) for size in (1, 2, 4) for rank in range(size)]
        """)
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*test_sum?1? PASSED*", "*test_sum?2? PASSED*", "*test_sum?4? PASSED*"])


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_t2_it_lives_beside_pytest_asyncio(run: Run, pytester: pytest.Pytester, mode: str) -> None:
    pytester.makeconftest("""
        import asyncio

        def pytest_asyncio_loop_factories(config, item):
            return {"one": asyncio.new_event_loop, "two": asyncio.new_event_loop}
        """)
    result = run(
        """
        import asyncio, pytest

        @pytest.mark.ranks(2)
        async def test_ranks(coll):
            await coll.barrier()

        @pytest.mark.asyncio
        async def test_plain():
            await asyncio.sleep(0)

        class TestMethods:
            @pytest.mark.ranks(2)
            async def test_method(self, coll):
                assert type(self).__name__ == "TestMethods"
                await coll.barrier()
        """,
        f"--asyncio-mode={mode}",
    )
    result.assert_outcomes(passed=4)  # the plain one twice
    result.stdout.fnmatch_lines(["*::test_ranks?2? PASSED*", "*::test_method?2? PASSED*"])


def test_t2_fixtures_and_parameters_go_with_it(run: Run) -> None:
    result = run("""
        import pytest

        @pytest.fixture
        def factor():
            return 3

        @pytest.mark.parametrize("x", [5, 7])
        @pytest.mark.ranks(2)
        async def test_product(coll, factor, x, tmp_path):
            assert tmp_path.is_dir()
            assert await coll.allreduce(factor * x) == 2 * factor * x

        @pytest.mark.ranks(2)
        @pytest.mark.ranks(3)
        async def test_two_marks(coll):
            await coll.barrier()

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(strict=True, raises=LookupError)
        async def test_expected(coll):
            raise LookupError

        @pytest.mark.ranks(2)
        async def test_skips(coll):
            pytest.skip("not today")
        """)
    result.assert_outcomes(passed=4, xfailed=1, skipped=1)
    result.stdout.fnmatch_lines(["*test_two_marks?2? PASSED*", "*test_two_marks?3? PASSED*"])


def test_t2_a_failure_shows_the_rank_and_its_line(run: Run) -> None:
    result = run("""
        import pytest

        @pytest.mark.ranks(3)
        async def test_wrong(coll):
            assert coll.rank < 2, "too many"
            await coll.barrier()

        @pytest.mark.ranks(2)
        async def test_stuck(coll):
            await coll.recv(src=1 - coll.rank)
        """)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*assert coll.rank < 2*", "*raised by rank 2 of 3*seed 0*", "*Deadlock*", "*rank 0*recv #0*test_it.py:10*"]
    )


def test_t2_the_seed_is_an_option(run: Run) -> None:
    source = """
        import pytest, torch
        order = []

        @pytest.mark.ranks(5)
        async def test_order(coll):
            await coll.barrier()
            order.append(coll.rank)

        def test_print():
            print("order", order)
        """
    orders = []
    for seed in (1, 1, 2, 3):
        said = run(source, "-s", f"--aiodist-seed={seed}").stdout.str()
        orders += re.findall(r"order \[.*\]", said)
    assert len(orders) == 4
    assert orders[0] == orders[1]
    assert len(set(orders)) > 1


def test_t2_a_wrong_marker_says_so(run: Run, pytester: pytest.Pytester) -> None:
    wrong = {
        "@pytest.mark.ranks(2)\ndef test_it(coll): pass": "is an async function: expected `async def test_it`",
        "@pytest.mark.ranks(2)\nasync def test_it(): pass": "takes the fixture coll",
        "@pytest.mark.ranks()\nasync def test_it(coll): pass": "ranks(): expected numbers of ranks, at least 1",
        "@pytest.mark.ranks(0)\nasync def test_it(coll): pass": "ranks(0,): expected numbers of ranks, at least 1",
        "@pytest.mark.ranks(2, backend='tcp')\nasync def test_it(coll): pass": "'tcp' is unknown",
        "@pytest.mark.ranks(2, n=3)\nasync def test_it(coll): pass": "unexpected keyword argument 'n'",
        "def test_it(coll): pass": "goes with @pytest.mark.ranks",
    }
    right = "@pytest.mark.ranks(2)\nasync def test_right(coll): await coll.barrier()"
    pytester.makepyfile(**{f"test_{i}": f"import pytest\n{source}\n{right}\n" for i, source in enumerate(wrong)})
    result = run("")
    # each fails alone: the other test in the same file runs
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes.get("failed", 0) + outcomes.get("errors", 0)) == (len(wrong), len(wrong))
    assert [complaint for complaint in wrong.values() if complaint not in result.stdout.str()] == []


def test_t2_the_plugin_loads_nothing_of_aiodist_but_itself() -> None:
    ours = "[name for name in sys.modules if name.startswith('aiodist') and '.' in name]"
    code = f"import sys, {PLUGIN}; print(sorted({{'torch', 'numpy', 'mpi4py', 'asyncio'}} & set(sys.modules)), {ours})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout == f"[] ['aiodist.testing', '{PLUGIN}']\n"


def test_t2_a_run_without_marked_tests_has_one_hook_more() -> None:
    """Nothing of ours is called for each test that runs: what a run without our mark costs is one look at each name."""
    hooks = {name for name in vars(sys.modules[PLUGIN]) if name.startswith("pytest_")}
    assert hooks == {"pytest_addoption", "pytest_configure", "pytest_pycollect_makeitem"}


ODD = """
    import functools
    from unittest import mock
    from unittest.mock import MagicMock, call, sentinel

    class Anything:
        def __getattr__(self, name):
            return self

        def __call__(self, *args, **kwargs):
            return self

    class Raises:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    class Classless:
        @property
        def __class__(self):
            raise RuntimeError("no class")

        def __call__(self):
            pass

    class Meta(type):
        def __getattr__(cls, name):
            raise RuntimeError(name)

    class ByMeta(metaclass=Meta):
        pass

    def looped():
        pass

    looped.__wrapped__ = looped

    def around_a_call():
        pass

    around_a_call.__wrapped__ = call

    def with_odd_marks():
        pass

    with_odd_marks.__dict__["pytestmark"] = [Raises(), Classless(), call]

    anything, raises, classless, magic = Anything(), Raises(), Classless(), MagicMock()
    bound, partial, static, by_class = [].append, functools.partial(print), staticmethod(call), classmethod(call)
    """


ODD_NAMES = [
    "call",
    "sentinel",
    "magic",
    "anything",
    "raises",
    "classless",
    "ByMeta",
    "looped",
    "around_a_call",
    "with_odd_marks",
    "bound",
    "partial",
    "static",
    "by_class",
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ODD_NAMES)
def test_t2_modules_of_others_are_collected_as_without_it(run: Run, name: str) -> None:
    """An object of another project may answer to any attribute, or raise: pytest alone decides what becomes of it."""
    source = textwrap.dedent(ODD) + f"test_odd = TestOdd = {name}\n\nclass TestClass:\n    test_odd = {name}\n"
    for text in (textwrap.dedent(ODD) + "def test_one():\n    pass\n", source):
        with_it = run(text, "-W", "ignore", "--tb=short")
        assert "aiodist/testing" not in with_it.stdout.str()
        without = run(text, "-W", "ignore", "--tb=short", "-p", "no:aiodist", "-p", f"no:{PLUGIN}")
        assert with_it.parseoutcomes() == without.parseoutcomes()
        assert with_it.ret == without.ret
    assert without.parseoutcomes() or without.ret


def test_t2_the_mark_may_stand_on_classes_modules_and_decorated_functions(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_module="""
        import functools, pytest

        pytestmark = pytest.mark.ranks(2)

        def decorated(function):
            @functools.wraps(function)
            async def around(*args, **kwargs):
                await function(*args, **kwargs)
            return around

        async def test_module(coll):
            await coll.barrier()

        @pytest.mark.ranks(3)
        @decorated
        async def test_decorated(coll):
            await coll.barrier()
        """
    )
    result = run("""
        import pytest
        from unittest import mock

        patched = 1

        @pytest.mark.ranks(1)  # one patch cannot be entered by several tasks
        @mock.patch(__name__ + ".patched")
        async def test_patched(patched, coll):
            assert isinstance(patched, mock.Mock)
            await coll.barrier()

        @pytest.mark.ranks(2)
        class TestClass:
            async def test_method(self, coll):
                await coll.barrier()

            @staticmethod
            async def test_static(coll):
                await coll.barrier()

            @classmethod
            async def test_class(cls, coll):
                assert cls.__name__ == "TestClass"
                await coll.barrier()
        """)
    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines(["*test_patched?1? PASSED*", "*test_class?2? PASSED*", "*test_decorated?3? PASSED*"])


def test_t2_a_project_keeps_a_mark_of_that_name(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest("""
        def pytest_configure(config):
            config.addinivalue_line("markers", "ranks(n): how many machines the test describes")
        """)
    result = run("""
        import pytest

        @pytest.mark.ranks("many", by="rack")
        def test_theirs():
            pass

        @pytest.mark.ranks(2)
        async def test_ours(coll):
            await coll.barrier()
        """)
    result.assert_outcomes(passed=2)


@pytest.mark.thorough
def test_t2_processes_tell_how_each_test_went(
    run: Run, pytester: pytest.Pytester, record_property: Callable[[str, object], None]
) -> None:
    result = run(
        """
        import os, pytest, sys

        @pytest.mark.ranks(2)
        async def test_passes(coll, tmp_path):
            pids = await coll.allgather_object(os.getpid())
            assert coll.backend == "mpi" and len(set(pids)) == coll.size == 2

        @pytest.mark.ranks(2)
        async def test_skips(coll):
            pytest.skip("not today")

        @pytest.mark.ranks(2)
        async def test_fails(coll):
            assert coll.rank == 0, "the other one"
            await coll.barrier()

        @pytest.mark.ranks(2)
        async def test_after_it(coll):
            await coll.barrier()

        def test_in_this_process():
            pass
        """,
        "--aiodist-backend=mpi",
        "--junit-xml=report.xml",
    )
    if result.parseoutcomes().get("skipped") == 4:
        pytest.skip("no MPI is installed")
    result.assert_outcomes(passed=3, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2 over mpi:", "*assert coll.rank == 0*", "rank 0: *Error*"])
    report = (pytester.path / "report.xml").read_text()
    assert report.count('<property name="mpi" value="Open MPI"') + report.count('name="mpi" value="MPICH"') == 4
    record_property("mpi", "Open MPI" if "Open MPI" in report else "MPICH")


@pytest.mark.thorough
def test_t2_a_rank_that_dies_fails_its_test_alone(run: Run) -> None:
    result = run(
        """
        import os, pytest, signal

        @pytest.mark.ranks(2)
        async def test_dies(coll):
            if coll.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            await coll.barrier()

        @pytest.mark.ranks(1)
        async def test_other_job(coll):
            await coll.barrier()
        """,
        "--aiodist-backend=mpi",
    )
    if result.parseoutcomes().get("skipped") == 2:
        pytest.skip("no MPI is installed")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*rank 1*no result*"])


@pytest.mark.thorough  # `make test` runs in such processes, and there are tests of deadlocks in it
def test_t2_a_deadlock_is_an_error_under_pytest_xdist_too(pytester: pytest.Pytester) -> None:
    """Each of its processes has a thread that waits for messages, which is none of the program's."""
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.timeout(50)
        @pytest.mark.ranks(2)
        async def test_waits(coll):
            await coll.recv(src=1 - coll.rank)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "1", timeout=60)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*DeadlockError*rank 0 waits for rank 1*"])


@pytest.mark.thorough
@pytest.mark.timeout(100)
def test_t2_a_test_that_is_interrupted_takes_no_other_along(run: Run) -> None:
    """The job of a test hangs, and pytest-timeout ends the wait: the next test gets a new job."""
    result = run(
        """
        import pytest, signal

        @pytest.mark.timeout(6)
        @pytest.mark.ranks(2, backend="gloo")
        async def test_hangs(coll):
            if coll.rank:
                signal.pause()
            await coll.barrier()

        @pytest.mark.ranks(2, backend="gloo")
        async def test_next(coll):
            await coll.barrier()
        """,
        "--aiodist-timeout=20",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Timeout (>6.0s)*"])


@pytest.mark.thorough
def test_t2_a_mark_allows_a_test_more_time_than_the_option(run: Run) -> None:
    result = run(
        """
        import pytest

        @pytest.mark.timeout(60)
        @pytest.mark.ranks(2, backend="gloo")
        async def test_long(coll):
            await coll.barrier()

        @pytest.mark.ranks(2, backend="shm")
        async def test_no_longer_than_the_option_says(coll):
            await coll.barrier()
        """,
        "--aiodist-timeout=0.1",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*test_no_longer*", "*gave no result*"])
