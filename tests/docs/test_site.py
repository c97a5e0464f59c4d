"""The site: it builds without a warning, needs no network, and works in a browser that reads it from the disk."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODE = shutil.which("node") or shutil.which("nodejs")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE = 360
"""How wide a narrow one is."""
FOREIGN = re.compile(r'(?:src|data-src)="(https?://[^"]+)"|<link[^>]+href="(https?://[^"]+)"')

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return folder


class Tab:
    """A tab of a browser, told what to do by the DevTools protocol."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._asked = 0

    async def ask(self, method: str, **arguments: object) -> None:
        self._asked += 1
        await self._channel.send_json({"id": self._asked, "method": method, "params": arguments})

    async def visit(self, page: str, script: str) -> tuple[Any, list[str]]:
        """Return what `script`, a promise, gives in a page that has loaded, and the complaints until then."""
        await self.ask("Page.navigate", url=page)
        complaints: list[str] = []
        evaluated = None
        async for message in self._channel:
            told = message.json()
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                complaints.append(message.data)
            elif told.get("method") == "Page.loadEventFired":
                await self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
                evaluated = self._asked
            elif evaluated is not None and told.get("id") == evaluated:
                return told["result"]["result"].get("value"), complaints
        raise AssertionError("the browser went away")


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """Open a browser whose window is as narrow as a phone."""
    aiohttp = pytest.importorskip("aiohttp")
    assert BROWSER is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={folder}")
    process = await asyncio.create_subprocess_exec(BROWSER, *options, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    reading = asyncio.ensure_future(process.stderr.read(0))
    try:
        async with asyncio.timeout(100), aiohttp.ClientSession() as session:
            listening = b"DevTools listening on ws://127.0.0.1:"
            while not (line := await process.stderr.readline()).startswith(listening):
                assert line, "the browser ended"
            port = line.removeprefix(listening).partition(b"/")[0].decode()
            reading = asyncio.ensure_future(process.stderr.read())
            async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as opened:
                socket = (await opened.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(socket, max_msg_size=0) as channel:
                tab = Tab(channel)
                for domain in ("Runtime", "Log", "Page"):
                    await tab.ask(f"{domain}.enable")
                size = {"width": PHONE, "height": 740, "deviceScaleFactor": 2, "mobile": False}
                await tab.ask("Emulation.setDeviceMetricsOverride", **size)
                yield tab
    finally:
        reading.cancel()
        process.kill()
        await process.wait()


@pytest.mark.thorough
def test_t4_every_public_module_and_example_has_a_page(site: Path) -> None:
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert examples <= {path.stem for path in (site / "examples").glob("*.html")}
    text = (site / "reference" / "communicator.html").read_text()
    assert all(f'id="aiodist.Communicator.{call}"' in text for call in ("allreduce", "recv", "split"))
    assert "aiodist run" in (site / "reference" / "command-line.html").read_text()


@pytest.mark.thorough
def test_t4_the_site_needs_no_network(site: Path) -> None:
    foreign = {match[0] for page in site.rglob("*.html") for match in FOREIGN.finditer(page.read_text())}
    assert not foreign


WIDTHS = "Promise.resolve([innerWidth, document.documentElement.scrollWidth - document.documentElement.clientWidth])"


@pytest.mark.thorough
@needs_browser
def test_t4_pages_have_no_error_and_fit_a_phone(site: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with browser(tmp_path) as tab:
            for page in pages:
                assert await tab.visit(page.as_uri(), WIDTHS) == ([PHONE, 0], []), page

    pages = sorted({*site.rglob("*.html")} - {site / "404.html"})  # which is for servers
    assert len(pages) > 80
    asyncio.run(main())


SEARCH = """new Promise(resolve => {
    const query = document.querySelector("[data-md-component=search-query]")
    document.querySelector("[data-md-toggle=search]").click()
    query.focus()
    query.value = WORD
    const look = () => {
        query.dispatchEvent(new Event("keyup"))
        const found = [...document.querySelectorAll(".md-search-result__link")].map(link => link.href)
        found.length ? resolve(found) : setTimeout(look, 200)
    }
    look()
})"""


@pytest.mark.thorough
@needs_browser
def test_t4_search_finds_allreduce_on_the_disk(site: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with browser(tmp_path) as tab:
            for word, section in {"allreduce": "reference/communicator.html", **SECTIONS}.items():
                script = SEARCH.replace("WORD", json.dumps(word))
                found, complaints = await tab.visit((site / "index.html").as_uri(), script)
                assert not complaints
                assert section.partition("#")[0] in found[0], f"{word}: {found}"

    asyncio.run(main())


ASK = """
const {readFileSync} = require("fs")
const [worker, index, ...words] = process.argv.slice(2)
let answer, listener
globalThis.self = globalThis
globalThis.addEventListener = (_, fn) => listener = fn
globalThis.postMessage = message => answer = message
;(0, eval)(readFileSync(worker, "utf8"))
const ask = async (type, data) => (await listener({data: {type, data}}), answer.data)
;(async () => {
    await ask(0, {...JSON.parse(readFileSync(index)), options: {suggest: false}})
    const found = {}
    for (const word of words) found[word] = (await ask(2, word)).items.flat().map(one => one.location)
    console.log(JSON.stringify(found))
})()
"""
"""A program of node that asks the site's own search; argument one is its worker, two its index."""

SECTIONS = {
    "validation": "train.html#evaluation-and-validation",
    "mixed precision": "train.html#mixed-precision-bf16-fp16-gradscaler",
    "gradient accumulation": "train.html#gradient-accumulation",
    "multi-GPU": "scale.html#multi-gpu-training-cuda_visible_devices",
    "CUDA_VISIBLE_DEVICES": "scale.html#multi-gpu-training-cuda_visible_devices",
    "Slurm": "run.html#slurm",
    "hang": "debug.html",
    "resume": "data.html#resume-training-also-on-another-number-of-ranks",
    "logging": "train.html#logging-on-one-rank-tensorboard-wb",
}
"""Queries of readers, with the section that must come first."""


@pytest.mark.thorough
@pytest.mark.skipif(NODE is None, reason="there is no node")
def test_t4_search_finds_the_section_of_a_users_word_first(site: Path) -> None:
    assert NODE is not None
    [worker] = (site / "assets/javascripts/workers").glob("search.*.js")
    asked = [NODE, "-", str(worker), str(site / "search/search_index.json"), *SECTIONS]
    answer = subprocess.run(asked, input=ASK, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(answer.stdout)
    assert {word: (found[word] or [None])[0] for word in SECTIONS} == SECTIONS, found


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_t4_a_drawing_without_a_picture_says_what_to_do() -> None:
    from mkdocs.exceptions import PluginError

    page = SimpleNamespace(file=SimpleNamespace(src_uri="new.md"), meta={})
    with pytest.raises(PluginError, match=r"new\.md has no picture: make drawings"):
        tool("site").on_page_markdown("```mermaid\nflowchart TD\n    nowhere-->drawn\n```\n", page)


def test_t4_every_drawing_has_its_picture() -> None:
    pictures = tool("pictures")
    wanted = {pictures.name_of(text) for text in pictures.drawings()}
    assert wanted == {path.name for path in pictures.FOLDER.iterdir()}, "make drawings"


def test_t4_pictures_have_a_ground_of_their_own_for_dark_pages() -> None:
    for picture in (ROOT / "docs" / "img").glob("*.svg"):
        ground = re.search(r'<path d="M 0 [^"]*z\s*" style="fill: #ffffff"/>', picture.read_text(encoding="utf-8"))
        assert ground, f"{picture.name}: text in dark letters, and nothing behind"
    assert ".drawing { overflow-x: auto; background: white;" in (ROOT / "docs" / "site.css").read_text()


def test_t4_make_pictures_makes_what_is_there_and_it_is_small() -> None:
    folder = ROOT / "docs" / "img"
    run = subprocess.run(["make", "-n", "pictures"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    named = "\n".join([run.stdout, *(path.read_text() for path in (ROOT / "tools").glob("*picture*.py"))])
    assert [path.name for path in folder.glob("*.svg") if path.name not in named] == []
    assert sum(path.stat().st_size for path in folder.rglob("*.*")) < 1_000_000
