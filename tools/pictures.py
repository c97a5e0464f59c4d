"""Makes pictures of the drawings in docs/, in docs/img/drawings: `python tools/pictures.py`; needs Graphviz's `dot`.

`make pictures` calls it, and makes the other pictures of docs/img too, each of a run.

Pages hold their drawings as text, in mermaid; the site shows each as an SVG of Graphviz, so that it can be read without
a network. An SVG is named after a digest of its text: a drawing that has changed has no picture, which a test tells.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "img" / "drawings"
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)

_NODE = re.compile(r'(?P<name>\w+)(?:\["?(?P<box>.*?)"?\]|\(\["?(?P<round>.*?)"?\]\)|\{"?(?P<choice>.*?)"?\})?')
_EDGE = re.compile(
    r"\s*(?:--|-\.) (?P<said>[^-|]+) (?P<end>-->|\.->)\s*|\s*(?P<line>-->|-\.->)(?:\|(?P<label>[^|]*)\|)?\s*"
)
_STATE = re.compile(r"(?P<from>\[\*\]|\w+) --> (?P<to>\[\*\]|\w+)(?:: (?P<label>.*))?")
_MESSAGE = re.compile(r"(?P<from>\w+)(?P<line>--?>>)(?P<to>\w+): (?P<label>.*)")


def drawings() -> Iterator[str]:
    """Yield the text of each drawing in docs/."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        yield from FENCE.findall(page.read_text(encoding="utf-8"))


def name_of(text: str) -> str:
    """Return what the picture of a drawing is called."""
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.svg"


def drawn(text: str) -> str:
    """Return a drawing as SVG."""
    kind, _, body = text.partition("\n")
    lines = [line.strip() for line in body.splitlines() if line.strip()]
    if kind == "sequenceDiagram":
        return _sequence(lines)
    graph = _states(lines) if kind.startswith("stateDiagram") else _flow(lines)
    direction = "LR" if kind.endswith("LR") else "TB"
    return _laid_out(graph, direction)


# --- graphs, which Graphviz lays out -----------------------------------------------------------------------------


class _Graph(NamedTuple):
    labels: dict[str, str]
    shapes: dict[str, str]
    edges: list[tuple[str, str, str, str]]
    """From, to, label, style."""


def _flow(lines: list[str]) -> _Graph:
    graph = _Graph({}, {}, [])
    for line in lines:
        before: list[str] = []
        place, style, label = 0, "", ""
        while place < len(line):
            names, place = _nodes(graph, line, place)
            graph.edges.extend((one, other, label, style) for one in before for other in names)
            edge = _EDGE.match(line, place)
            if edge is None:
                break
            before, place = names, edge.end()
            style = "dashed" if ".->" in edge[0] else "solid"
            label = edge["said"] or edge["label"] or ""
        if line[place:].strip():
            raise ValueError(f"not understood: {line!r} from {line[place:]!r}")
    return graph


def _nodes(graph: _Graph, line: str, place: int) -> tuple[list[str], int]:
    """Return the names of `a["text"] & b`, and where that ends."""
    names = []
    while node := _NODE.match(line, place):
        names.append(node["name"])
        text = node["box"] or node["round"] or node["choice"]
        if text is not None:
            graph.labels[node["name"]] = text
            graph.shapes[node["name"]] = "diamond" if node["choice"] else "box"
        place = node.end()
        if not line.startswith(" & ", place):
            break
        place += 3
    return names, place


def _states(lines: list[str]) -> _Graph:
    graph = _Graph({}, {}, [])
    for line in lines:
        found = _STATE.fullmatch(line)
        if found is None:
            raise ValueError(f"not understood: {line!r}")
        ends = []
        for end, called in (("from", "begin"), ("to", "end")):
            name = called if found[end] == "[*]" else found[end]
            graph.labels[name] = "" if found[end] == "[*]" else name
            graph.shapes[name] = "point" if found[end] == "[*]" else "box"
            ends.append(name)
        graph.edges.append((ends[0], ends[1], found["label"] or "", "solid"))
    return graph


def _laid_out(graph: _Graph, direction: str) -> str:
    names = dict.fromkeys([*graph.labels, *(end for edge in graph.edges for end in edge[:2])])
    lines = [
        "digraph {",
        f'rankdir={direction}; bgcolor=transparent; pad=0.1; nodesep=0.25; ranksep=0.4; fontname="Helvetica"',
        'node [fontname="Helvetica", fontsize=11, style="filled,rounded", fillcolor="#eef3fb", color="#4a6fa5"]',
        'edge [fontname="Helvetica", fontsize=10, color="#555555", fontcolor="#333333", arrowsize=0.7]',
    ]
    for name in names:
        label = _wrapped(graph.labels.get(name, name))
        lines.append(f'{name} [label="{label}", shape={graph.shapes.get(name, "box")}]')
    for one, other, label, style in graph.edges:
        lines.append(f'{one} -> {other} [label="{_wrapped(label)}", style={style}]')
    done = subprocess.run(
        ["dot", "-Tsvg"], input="\n".join([*lines, "}"]), capture_output=True, text=True, timeout=60, check=True
    )
    svg = done.stdout[done.stdout.index("<svg") :]
    return re.sub(r"<!--.*?-->\n?|<title>.*?</title>\n?", "", svg, flags=re.DOTALL)


def _wrapped(label: str, width: int = 34) -> str:
    """Return a label in lines of at most `width` characters; `<br/>` starts a new line."""
    lines = []
    for part in label.replace('"', "'").split("<br/>"):
        line = ""
        for word in part.split():
            if line and len(line) + len(word) >= width:
                lines.append(line)
                line = ""
            line = f"{line} {word}".strip()
        lines.append(line)
    return r"\n".join(lines)


# --- sequences ---------------------------------------------------------------------------------------------------

_COLUMN, _ROW, _TOP = 190, 34, 52


def _sequence(lines: list[str]) -> str:
    """Return the picture of a sequence of messages, from top to bottom."""
    titles = dict(line.removeprefix("participant ").split(" as ") for line in lines if line.startswith("participant"))
    place = {name: _COLUMN * (column + 0.5) for column, name in enumerate(titles)}
    said = [found for line in lines if (found := _MESSAGE.fullmatch(line))]
    beside = _COLUMN * any(found["from"] == found["to"] == list(titles)[-1] for found in said)
    width, height = _COLUMN * len(titles) + beside, _TOP + _ROW * (len(said) + 1)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica" font-size="11">',
        '<marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker>',
    ]
    for name, title in titles.items():
        x = place[name]
        out.append(f'<path d="M{x} {_TOP - 6}V{height}" stroke="#bbb"/>')
        out.append(
            f'<rect x="{x - 88}" y="6" width="176" height="{_TOP - 12}" rx="5" fill="#eef3fb" stroke="#4a6fa5"/>'
        )
        rows = _wrapped(title, 28).split(r"\n")
        out += [_text(x, 29 + 13 * (row - len(rows) / 2 + 0.5), text) for row, text in enumerate(rows)]
    for row, found in enumerate(said, 1):
        out += _message(found, place[found["from"]], place[found["to"]], _TOP + _ROW * row)
    return "\n".join([*out, "</svg>\n"])


def _message(found: re.Match[str], start: float, end: float, y: float) -> list[str]:
    dashed = ' stroke-dasharray="4 3"' if found["line"] == "-->>" else ""
    stroke = f'fill="none" stroke="#555"{dashed} marker-end="url(#arrow)"'
    if start == end:
        return [
            f'<path d="M{start} {y - 10}h24v12h-22" {stroke}/>',
            _text(start + 30, y + 1, found["label"], anchor="start"),
        ]
    return [f'<path d="M{start} {y}H{end}" {stroke}/>', _text((start + end) / 2, y - 5, found["label"])]


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#222">{escaped}</text>'


def main() -> None:
    """Draw what has no picture, and remove pictures of drawings that are no more."""
    if shutil.which("dot") is None:
        sys.exit("pictures: Graphviz's dot was not found; Debian and Ubuntu have it in the package graphviz")
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = {name_of(text): text for text in drawings()}
    for old in FOLDER.glob("*.svg"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        if not (FOLDER / name).exists():
            (FOLDER / name).write_text(drawn(text), encoding="utf-8")


if __name__ == "__main__":
    main()
