"""P15: the rows of one server: their index, first values, optimizers and memory, against dicts and torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aiodist.ps import SGD, Adagrad, Adam, Constant, Normal, RMSprop, Uniform, optimizer
from aiodist.ps.row_store import RowIndex, RowOptimizer, RowStore
from aiodist.ps.rows import TableSpec, grouped, ids_in, mix, owners, packed_rows, unpack

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's optimizers make sparse tensors
HIGH = 2**63 - 1
any_id = st.one_of(st.integers(0, 40), st.integers(0, HIGH), st.integers(0, 40).map(lambda i: i << 40))


def spec(dim: int = 3, rows: int | None = None, rule: Any = None, initial: Any = None, **more: Any) -> TableSpec:
    """Return a table in float64."""
    return TableSpec(dim, rows, torch.float64, initial or Normal(), more.pop("seed", 5), rule, **more)


@given(st.lists(st.lists(any_id, max_size=200), max_size=6), st.lists(any_id, max_size=50))
def test_p15_the_index_is_a_dict(batches: list[list[int]], others: list[int]) -> None:
    index, expected = RowIndex(), dict[int, int]()
    for batch in batches:
        new = [one for one in dict.fromkeys(batch) if one not in expected]
        slots = index.add(torch.tensor(new, dtype=torch.int64))
        assert slots.tolist() == list(range(len(expected), len(expected) + len(new)))
        expected.update(zip(new, slots.tolist(), strict=True))
        asked = batch + others
        found = index.find(torch.tensor(asked, dtype=torch.int64)).tolist()
        assert found == [expected.get(one, -1) for one in asked]
    assert index.ids.tolist() == list(expected)
    assert len(index) == len(expected)


def test_p15_ids_that_all_begin_at_one_cell_are_found() -> None:
    index = RowIndex()
    ids = torch.arange(200_000)
    crowd = ids[(mix(ids) & 1023) == 7][:120]  # more than a window, in a table of 256 cells that is half full
    assert crowd.numel() > 100
    index.add(crowd)
    assert index.find(crowd).tolist() == list(range(crowd.numel()))
    assert index.find(ids[:50]).tolist() == [crowd.tolist().index(i) if i in crowd.tolist() else -1 for i in range(50)]


@pytest.mark.thorough
def test_p15_a_million_ids_in_batches() -> None:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    ids = torch.randint(0, HIGH, (1_000_000,), generator=generator).unique()
    index = RowIndex()
    for batch in ids.split(50_001):
        index.add(batch)
    order = torch.randperm(ids.numel(), generator=generator)[:20_000]
    assert torch.equal(index.find(ids[order]), order)
    others = torch.randint(0, HIGH, (20_000,), generator=generator)
    others = others[~torch.isin(others, ids)]
    assert (index.find(others) == -1).all()


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_p15_rows_are_spread_evenly_whatever_the_ids_are(servers: int) -> None:
    for ids in (torch.arange(30_000), torch.arange(30_000) * servers, torch.arange(30_000) << 32):
        counts = torch.bincount(owners(ids, servers), minlength=servers)
        assert counts.numel() == servers
        assert (counts - 30_000 / servers).abs().max() < 6 * (30_000 / servers) ** 0.5


def test_p15_mixing_is_splitmix64() -> None:
    def expected(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    given = [0, 1, HIGH, 1 << 62, *(random.randrange(1 << 63) for _ in range(50))]
    found = [one % 2**64 for one in mix(torch.tensor(given)).tolist()]
    assert found == [expected(one) for one in given]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("initial", [Normal(), Uniform(-2.0, 0.5), Constant(3.0), Normal(1.0, 0.0)])
def test_p15_first_values_depend_on_seed_and_id_alone(initial: Any, dtype: torch.dtype) -> None:
    ids = torch.randint(0, HIGH, (1000,))
    wanted, whole = TableSpec(7, None, dtype, initial, 11, None), torch.empty(1000, 7, dtype=dtype)
    wanted.first_rows(ids, whole)
    order = torch.randperm(1000)
    parts = torch.empty(1000, 7, dtype=dtype)
    for some in order.split(37):
        one = torch.empty(some.numel(), 7, dtype=dtype)
        wanted.first_rows(ids[some], one)
        parts[some] = one
    assert torch.equal(whole, parts)
    other = torch.empty_like(whole)
    replace(wanted, seed=12).first_rows(ids, other)
    drawn = not isinstance(initial, Constant) and initial != Normal(1.0, 0.0)
    assert torch.equal(whole, other) != drawn


def test_p15_first_values_have_the_distribution_that_is_said() -> None:
    ids = torch.arange(20_000) * 1_000_003
    values = torch.empty(20_000, 5, dtype=torch.float64)
    for initial, mean, std in ((Normal(0.5, 2.0), 0.5, 2.0), (Uniform(-1.0, 3.0), 1.0, 4 / 12**0.5)):
        spec(5, initial=initial, seed=random.randrange(1 << 40)).first_rows(ids, values)
        assert abs(values.mean() - mean) < 5 * std / 100_000**0.5
        assert abs(values.std() - std) < 0.02 * std
        correlation = torch.corrcoef(values.T) - torch.eye(5)
        assert correlation.abs().max() < 0.05
        assert torch.corrcoef(torch.stack([values[:-1, 0], values[1:, 0]]))[0, 1].abs() < 0.05
        assert values.isfinite().all()
    assert (values < 3).all()


OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (SGD(lr=0.2), lambda params: torch.optim.SGD(params, lr=0.2)),
    "maximize": (SGD(lr=0.2, maximize=True), lambda params: torch.optim.SGD(params, lr=0.2, maximize=True)),
    "adagrad": (Adagrad(lr=0.2), lambda params: torch.optim.Adagrad(params, lr=0.2)),
    "decaying": (
        Adagrad(lr=0.2, lr_decay=0.3, initial_accumulator_value=0.7, eps=1e-3),
        lambda params: torch.optim.Adagrad(params, lr=0.2, lr_decay=0.3, initial_accumulator_value=0.7, eps=1e-3),
    ),
    "adam": (Adam(lr=0.1), lambda params: torch.optim.SparseAdam(params, lr=0.1)),
    "betas": (
        Adam(lr=0.1, betas=(0.5, 0.7), eps=0.1, maximize=True),
        lambda params: torch.optim.SparseAdam(params, lr=0.1, betas=(0.5, 0.7), eps=0.1, maximize=True),
    ),
}


@pytest.mark.parametrize("dim", [1, 2, 5])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_p15_optimizers_of_rows_are_those_of_torch(case: str, dim: int) -> None:
    rule, make = OPTIMIZERS[case]
    store = RowStore(spec(dim, 400, rule))
    ids = torch.arange(400)
    first = torch.empty(400, dim, dtype=torch.float64)
    store.read(ids, first)
    weight = torch.nn.Parameter(first.clone())
    torchs = make([weight])
    for step in range(8):
        used = torch.randperm(400)[: 0 if step == 4 else 90].sort().values  # rows are made, and memory grows
        gradient = torch.randn(used.numel(), dim, dtype=torch.float64)
        weight.grad = torch.sparse_coo_tensor(used[None], gradient, (400, dim), check_invariants=True)
        torchs.step()
        store.step(used, gradient.clone())
        found = torch.empty_like(first)
        store.read(ids, found)
        torch.testing.assert_close(found, weight.detach(), rtol=0, atol=1e-12)
    assert len(store) < 400
    assert store.steps == 8


def test_p15_settings_that_rows_cannot_have_are_refused() -> None:
    for rule, told in (
        (SGD(lr=0.1, momentum=0.9), "SGD of rows: momentum: expected settings that change only pushed rows"),
        (SGD(lr=0.1, weight_decay=0.1), "weight_decay"),
        (Adam(lr=0.1, amsgrad=True), "Adam of rows: amsgrad"),
    ):
        with pytest.raises(ValueError, match=told):
            RowOptimizer(rule, torch.float64)
    with pytest.raises(TypeError, match="RMSprop of rows: expected SGD, Adagrad or Adam"):
        RowOptimizer(RMSprop(lr=0.1), torch.float64)
    with pytest.raises(TypeError, match="AdamW of rows"):
        RowOptimizer(optimizer(torch.optim.AdamW, lr=0.1), torch.float64)
    adagrad = RowOptimizer(Adagrad(lr=0.1), torch.float64)
    adagrad.configure({"lr": 0.5})
    assert adagrad.settings["lr"] == 0.5
    for changes, kind, told in (
        ({"lr": "fast"}, TypeError, "lr='fast': expected a number"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate"),
        ({"momentum": 0.9}, ValueError, "Adagrad of rows: momentum"),
        ({"weight_decay": 0.1}, ValueError, "weight_decay: expected settings that change only pushed rows"),
        ({"initial_accumulator_value": 1.0}, ValueError, "initial_accumulator_value: expected eps, lr"),
    ):
        with pytest.raises(kind, match=told):
            adagrad.configure(changes)
        assert adagrad.settings["lr"] == 0.5


@pytest.mark.parametrize("rule", [None, Adagrad(lr=0.1, initial_accumulator_value=0.5), Adam(lr=0.1)], ids=str)
def test_p15_the_state_of_a_table_goes_to_any_number_of_servers(rule: Any) -> None:
    wanted = spec(2, None, rule)
    ids = torch.randint(0, HIGH, (500,)).unique()
    old = [RowStore(wanted) for _ in range(3)]

    def write(stores: list[RowStore], ids: Tensor, values: Tensor) -> None:
        for number, store in enumerate(stores):
            mine = owners(ids, len(stores)) == number
            if rule is None:
                store.add(ids[mine], values[mine])
            else:
                store.step(ids[mine], values[mine].clone())

    def read(stores: list[RowStore], ids: Tensor) -> Tensor:
        into = torch.empty(ids.numel(), 2, dtype=torch.float64)
        for number, store in enumerate(stores):
            mine = owners(ids, len(stores)) == number
            part = torch.empty(int(mine.sum()), 2, dtype=torch.float64)
            store.read(ids[mine], part)
            into[mine] = part
        return into

    write(old, ids[:400], torch.randn(400, 2, dtype=torch.float64))
    states = [store.state_dict() for store in old]
    assert sum(state["ids"].numel() for state in states) == 400
    second = torch.randn(ids.numel(), 2, dtype=torch.float64)
    write(old, ids, second)  # what was given is a copy
    for size in (1, 2, 5):
        new = [RowStore(wanted) for _ in range(size)]
        for number, store in enumerate(new):
            for state in states:
                store.load_state_dict(state, lambda ids, number=number, size=size: owners(ids, size) == number)  # type: ignore[misc]
        write(new, ids, second)
        assert torch.equal(read(new, ids), read(old, ids))


def test_p15_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    store = RowStore(spec(2, 100, Adagrad(lr=0.1)))
    store.step(torch.tensor([1, 5]), torch.ones(2, 2, dtype=torch.float64))
    good = store.state_dict()
    for change, kind, told in (
        ({"ids": torch.tensor([1, 1])}, ValueError, "ids in int64, each once"),
        ({"ids": torch.tensor([1, 100])}, ValueError, "id 100: expected 0 to 99"),
        ({"ids": torch.tensor([1.0, 2.0])}, ValueError, "ids in int64, each once"),
        (
            {"rows": torch.ones(2, 3, dtype=torch.float64)},
            ValueError,
            r"rows is float64 \[2, 3\]: expected float64 \[2, 2\]",
        ),
        ({"sum": torch.ones(2, 2)}, ValueError, r"sum is float32 \[2, 2\]: expected float64"),
        ({"exp_avg": good["sum"]}, ValueError, "expected ids, rows, settings, steps, sum"),
    ):
        with pytest.raises(kind, match=told):
            store.load_state_dict({**good, **change}, lambda ids: ids >= 0)
        assert torch.equal(store.state_dict()["rows"], good["rows"])


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize("shape", [(0,), (1,), (6, 7), (3, 0, 2), ()])
def test_p15_calls_are_grouped_by_server_and_find_back(shape: tuple[int, ...], servers: int) -> None:
    ids = torch.randint(0, 9, shape) * (HIGH // 9)
    found = grouped(ids.clone(), spec(), servers)
    assert torch.equal(found.ids[found.places].view(shape), ids)
    assert found.ids.unique().numel() == found.ids.numel()
    assert sum(found.counts) == found.ids.numel()
    for number, block in enumerate(found.blocks()):
        assert (owners(found.ids[block], servers) == number).all()
        assert torch.equal(found.ids[block], found.ids[block].sort().values)
    values = torch.randn(ids.numel(), 2, dtype=torch.float64)
    total, last = found.summed(values), found.last(values)
    for row, one in enumerate(found.ids.tolist()):
        same = (ids.flatten() == one).nonzero().flatten()
        torch.testing.assert_close(total[row], values[same].sum(0))
        assert torch.equal(last[row], values[same[-1]])


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize("repeats", ["none", "few", "one often", "all"])
def test_p15_ids_of_a_read_are_sorted_if_many_repeat(repeats: str, servers: int) -> None:
    ids = torch.randint(0, HIGH, (7013,))
    if repeats == "few":
        ids[5::97] = ids[0]
    elif repeats == "one often":
        ids[torch.rand(ids.numel()) < 0.5] = 0
    elif repeats == "all":
        ids = torch.cat([ids, ids])[torch.randperm(2 * ids.numel())]
    shown = ids.view(-1, 1) if repeats == "few" else ids
    found = grouped(shown, spec(), servers, to_read=True)
    assert torch.equal(found.ids[found.places], ids)
    assert found.shape == shown.shape
    for number, block in enumerate(found.blocks()):
        assert (owners(found.ids[block], servers) == number).all()
    assert (found.ids.numel() == ids.numel()) is (repeats in ("none", "few"))
    assert found.as_called is (servers == 1 and found.ids.numel() == ids.numel())
    if found.as_called:
        assert torch.equal(found.ids, ids)
    with pytest.raises(ValueError, match="expected 0 to"):
        grouped(torch.cat([ids, torch.tensor([-1])]), spec(), servers, to_read=True)


def test_p15_what_is_packed_is_checked_to_the_byte() -> None:
    wanted = spec(2, 50)
    ids, rows = torch.tensor([3, 7, 49]), torch.randn(3, 2, dtype=torch.float64)
    packed = packed_rows(ids, rows)
    assert packed.numel() == 8 + ids.nbytes + rows.nbytes
    found, values = unpack(packed, wanted)
    assert torch.equal(found, ids)
    assert torch.equal(values, rows)
    assert torch.equal(packed_rows(ids, rows, lambda nbytes: torch.empty(nbytes + 9, dtype=torch.uint8)), packed)

    def with_count(count: int) -> Tensor:
        return torch.cat([torch.tensor([count]).view(torch.uint8), packed[8:]])

    for bad in (packed[:7], packed[:-1], with_count(-1), with_count(1 << 60), with_count(10), with_count(2)):
        with pytest.raises(ValueError, match=r"rows in \d+ bytes: expected"):
            unpack(bad, wanted)
    for wrong in ([7, 3], [3, 3], [-1, 3], [3, 50]):
        with pytest.raises(ValueError, match=r"do not rise|expected 0 to 49"):
            ids_in(torch.tensor(wrong).view(torch.uint8), wanted)
    read = torch.tensor([7, 3, 3, 49])
    assert torch.equal(ids_in(read.view(torch.uint8), wanted, rise=False), read)
    for wrong in ([7, -1, 3], [3, 50, 7]):
        with pytest.raises(ValueError, match="expected 0 to 49"):
            ids_in(torch.tensor(wrong).view(torch.uint8), wanted, rise=False)
    with pytest.raises(ValueError, match="ids in 9 bytes: expected a multiple of 8"):
        ids_in(torch.zeros(9, dtype=torch.uint8), wanted)
