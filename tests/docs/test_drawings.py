"""The drawings in docs/ agree with the code; `make drawings` rewrites them."""

from __future__ import annotations

import importlib.util
import re
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def drawings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "tools" / "drawings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(drawings: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(drawings, "ROOT", tmp_path)
    (tmp_path / "aiodist").mkdir()
    return tmp_path / "aiodist"


@pytest.mark.thorough
def test_drawings_are_those_of_the_code(drawings: ModuleType) -> None:
    for page in drawings.pages():
        assert drawings.rewritten(page.read_text()) == page.read_text(), f"{page}: make drawings"


def test_each_package_is_drawn_once(drawings: ModuleType) -> None:
    drawn = [package for page in drawings.pages() for package in drawings.asked(page.read_text())]
    assert sorted(drawn) == sorted(drawings.packages())


def test_arrows_are_imports_that_no_longer_way_replaces(drawings: ModuleType, package: Path) -> None:
    (package / "top.py").write_text('"""The\ntop."""\nfrom aiodist.middle import x\nfrom aiodist import bottom\n')
    (package / "middle.py").write_text('"""The middle.\n\nMore."""\ndef f():\n    import aiodist.bottom\n')
    (package / "bottom.py").write_text('"""The bottom."""\nif TYPE_CHECKING:\n    from aiodist.top import x\n')
    assert drawings.drawing("aiodist").splitlines() == [
        *("```mermaid", "flowchart TD", '    m0["top"]', '    m1["middle"]', '    m2["bottom"]'),
        *("    m0-->m1", "    m1-->m2", "```", "", "| | |", "|---|---|"),
        *("| `top` | The top. |", "| `middle` | The middle. |", "| `bottom` | The bottom. |"),
    ]


def test_what_leads_to_one_another_is_on_one_layer(drawings: ModuleType, package: Path) -> None:
    (package / "folder").mkdir()
    (package / "folder" / "__init__.py").write_text('"""A folder."""')
    (package / "folder" / "inner.py").write_text("from aiodist.beside import x\nfrom aiodist.below import x")
    (package / "beside.py").write_text('"""Beside it."""\nfrom aiodist.folder.inner import x')
    (package / "below.py").write_text('"""Below."""')
    lines = drawings.drawing("aiodist").splitlines()
    assert lines[2:9] == [
        *('    m0["beside"]', '    m1["folder/"]', '    m2["below"]'),
        *("    m0-->m1", "    m1-->m0 & m2", "```", ""),
    ]


def test_a_group_is_one_box(drawings: ModuleType, package: Path) -> None:
    (package / "call.py").write_text('"""A call."""\nfrom aiodist.check import x')
    (package / "check.py").write_text('"""A check."""\nfrom aiodist.base import x')
    (package / "base.py").write_text('"""The base."""')
    page = "<!-- modules: aiodist\ncalls: check call\n-->\nold\n<!-- end -->\n"
    drawn = drawings.rewritten(page)
    assert drawn.splitlines()[:3] == page.splitlines()[:3]
    assert drawn.splitlines()[6:9] == ['    m0["calls<br/>call, check"]', '    m1["base"]', "    m0-->m1"]
    assert drawn.splitlines()[13:17] == [
        *("| **calls** | |", "| `call` | A call. |", "| `check` | A check. |", "| `base` | The base. |"),
    ]
    assert drawings.rewritten(drawn) == drawn
    alone = drawings.rewritten("<!-- drawing: aiodist -->\n<!-- end -->\n")
    assert "m0" in alone
    assert "| A call. |" not in alone
    assert drawings.rewritten(page.replace("check call", "call gone check")) == drawn.replace(
        "check call", "call check"
    )
    for groups, wrong in (("calls: call\nothers: call", "two groups: call"), ("base: call", "called as modules")):
        with pytest.raises(ValueError, match=wrong):
            drawings.rewritten(f"<!-- modules: aiodist\n{groups}\n-->\n<!-- end -->\n")


def test_no_drawing_has_a_cycle(drawings: ModuleType) -> None:
    for page in drawings.pages():
        for drawn in re.findall(r"```mermaid\nflowchart TD\n(.*?)```", page.read_text(), re.DOTALL):
            arrows = re.findall(r"^    (m\d+)-->(.+)$", drawn, re.MULTILINE)
            TopologicalSorter({box: below.split(" & ") for box, below in arrows}).prepare()  # raises CycleError


def test_no_drawing_has_too_many_boxes(drawings: ModuleType) -> None:
    for page in drawings.pages():
        for drawn in re.findall(r"```mermaid\nflowchart TD\n(.*?)```", page.read_text(), re.DOTALL):
            assert len(re.findall(r"^    \w+\[", drawn, re.MULTILINE)) <= drawings.MOST_BOXES, page
