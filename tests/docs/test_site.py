"""The site: it builds without a warning, needs no network, and works in a browser."""

from __future__ import annotations

import asyncio
import functools
import http.server
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


async def seen(page: str, script: str, folder: Path, width: int = 1200) -> tuple[object, list[str]]:
    """Open a page in the browser; return what `script`, a promise, gives there, and the errors of its console."""
    aiohttp = pytest.importorskip("aiohttp")
    assert BROWSER is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={folder}")
    command = [BROWSER, *options, f"--window-size={width},900", "about:blank"]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    listening = folder / "DevToolsActivePort"
    try:
        async with asyncio.timeout(90), aiohttp.ClientSession() as session:
            while not listening.exists() or "\n" not in listening.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            port = listening.read_text().partition("\n")[0]
            async with session.put(f"http://127.0.0.1:{port}/json/new?{page}") as opened:
                socket = (await opened.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(socket, max_msg_size=0) as channel:
                for number, method in enumerate(("Runtime.enable", "Log.enable", "Page.enable", "Page.reload")):
                    await channel.send_json({"id": number, "method": method})
                complaints = []
                async for message in channel:
                    told = message.json()
                    if told.get("method") == "Runtime.exceptionThrown" or "entry" in told.get("params", {}):
                        complaints.append(message.data)
                    elif told.get("method") == "Page.loadEventFired":
                        asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
                        await channel.send_json({"id": 99, "method": "Runtime.evaluate", "params": asked})
                    elif told.get("id") == 99:
                        return told["result"]["result"].get("value"), complaints
            raise AssertionError("the browser went away")
    finally:
        browser.kill()
        browser.wait()


def test_t4_every_public_module_and_example_has_a_page(site: Path) -> None:
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert examples <= {path.stem for path in (site / "examples").glob("*.html")}
    text = (site / "reference" / "communicator.html").read_text()
    assert all(f'id="aiodist.Communicator.{call}"' in text for call in ("allreduce", "recv", "split"))
    assert "aiodist run" in (site / "reference" / "command-line.html").read_text()


def test_t4_the_site_needs_no_network(site: Path) -> None:
    foreign = {match[0] for page in site.rglob("*.html") for match in FOREIGN.finditer(page.read_text())}
    assert not foreign


@pytest.mark.thorough
@needs_browser
@pytest.mark.parametrize("page", ["index.html", "design.html", "reference/communicator.html", "performance.html"])
def test_t4_pages_have_no_error_and_fit_a_phone(page: str, address: str, tmp_path: Path) -> None:
    sizes = "Promise.resolve([document.documentElement.scrollWidth, innerWidth])"
    found, complaints = asyncio.run(seen(f"{address}/{page}", sizes, tmp_path, width=500))  # the least that it takes
    assert not complaints
    assert isinstance(found, list)
    assert found[0] <= found[1]


SEARCH = """new Promise(resolve => {
    const query = document.querySelector("[data-md-component=search-query]")
    document.querySelector("[data-md-toggle=search]").click()
    query.focus()
    query.value = "allreduce"
    const look = () => {
        query.dispatchEvent(new Event("keyup"))
        const found = [...document.querySelectorAll(".md-search-result__link")].map(link => link.href)
        found.length ? resolve(found) : setTimeout(look, 200)
    }
    look()
})"""


@pytest.mark.thorough
@needs_browser
def test_t4_search_finds_allreduce(address: str, tmp_path: Path) -> None:
    found, complaints = asyncio.run(seen(f"{address}/index.html", SEARCH, tmp_path))
    assert not complaints
    assert isinstance(found, list)
    assert any("reference/communicator.html" in link for link in found)


def test_t4_every_drawing_has_its_picture() -> None:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    wanted = {pictures.name_of(text) for text in pictures.drawings()}
    assert wanted == {path.name for path in pictures.FOLDER.iterdir()}, "make pictures"
