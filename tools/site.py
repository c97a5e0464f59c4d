"""Hooks of MkDocs: pages made from other files, and drawings as pictures.

README.md is the first page; CHANGELOG.md, CONTRIBUTING.md and SECURITY.md have a page each, and so has every example.
The reference has a page for each public module, whose names come from `__all__` and whose texts are the docstrings,
and one for the command line. Modules are parsed, not imported, apart from the command line's.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
_PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "contract.md": "tests/CONTRACT.md",
    "results.md": "benchmarks/RESULTS.md",
}
_UNSEARCHED = ("changelog.md", "contract.md", "results.md")
"""Pages that the search leaves out: they hold every word of the project."""
_USED, _MADE = 10, 0.001
"""How much a hit counts in the search, on pages for users and on those of how it works; elsewhere 1."""
_TOP = {
    "starting": ("Start and end: init, run, open, start", ("init", "run", "open", "start", "isolate")),
    "communicator": ("Communicator: collectives and messages", ("Communicator", "ReduceOp", "ANY")),
    "handle": ("Handles, gather, timeout", ("Handle", "gather", "as_completed", "timeout", "as_handle")),
    "errors": ("Errors", ()),
}
"""Pages of the names of `aiodist` itself; errors are all that is left of its classes."""
_OURS = ("Communicator", "Handle")
"""Classes that users do not construct: their pages have no arguments."""
_HANDLE = (
    *("done", "cancelled", "result", "exception", "wait", "wait_stream"),
    *("add_done_callback", "remove_done_callback", "cancel", "detach"),
)
"""Methods of `Handle` for users; the others are for code that owns the operation. The class lists its attributes."""
_MODULES = {
    "nn": "Training nets and optimizers",
    "data": "Data loading",
    "checkpoints": "Checkpoints",
    "ps": "Parameter server",
    "codecs": "Compression codecs",
    "engine": "Training engine",
    "c10d": "torch.distributed backend",
    "streams": "CUDA and host streams",
    "handles": "Handles for library authors",
    "testing": "Testing",
}
"""Titles of the pages of modules."""
_TOOLTIPS = (ROOT / "tools" / "tooltips.md").read_text(encoding="utf-8")
"""Explanations of words, shown when the pointer rests on one."""
_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)")


def _pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = _pictures()


def pages() -> dict[str, str]:
    """Return the pages that are made, by where they are in the site."""
    made = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in _PAGES.items()}
    made |= {page: f"---\nsearch:\n  exclude: true\n---\n{made[page]}" for page in _UNSEARCHED}
    return made | _examples() | _reference()


def _linked(text: str) -> str:
    """Return a page of the root, or of docs/, with links that lead to pages of the site."""
    homes = {source: page for page, source in _PAGES.items()}
    homes |= dict.fromkeys(("examples", "examples/", "examples/README.md"), "examples/index.md")

    def led(link: re.Match[str]) -> str:
        up = "../" if link[1].startswith("../../") else ""  # of a page of docs/design
        target = link[1].removeprefix(up).removeprefix("../").removeprefix("docs/")
        example = re.fullmatch(r"(examples/\w+)\.py", target)
        home = f"{example[1]}.md" if example else homes.get(target)
        return f"]({up}{home}" if home else f"]({link[1].removeprefix('../docs/').removeprefix('docs/')}"

    return _LINK.sub(led, text)


# --- examples ----------------------------------------------------------------------------------------------------


def _examples() -> dict[str, str]:
    """Return the index, examples/README.md, and a page for each example, in its order."""
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    found = {"examples/index.md": re.sub(r"\]\((\w+)\.py\)", r"](\1.md)", readme)}
    for name in re.findall(r"\]\((\w+)\.py\)", readme):
        text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        found[f"examples/{name}.md"] = f"# {name}.py\n\n```python\n{text}```\n"
    return found


# --- the reference -----------------------------------------------------------------------------------------------


def _reference() -> dict[str, str]:
    public = _public("aiodist")
    named = {name for _, names in _TOP.values() for name in names}
    errors = tuple(name for name in public if name[0].isupper() and name not in named | {"Engine", "ParameterServer"})
    found = {}
    for page, (title, names) in _TOP.items():
        found[f"reference/{page}.md"] = _entries(title, "aiodist", names or errors)
    for module, title in _MODULES.items():
        full = f"aiodist.{module}"
        found[f"reference/{module}.md"] = _entries(f"{title}: `{full}`", full, _public(full))
    found["reference/compat.md"] = (
        "# mpi4py replacement: `aiodist.compat.mpi`\n\n::: aiodist.compat.mpi\n    options: {members: false}\n"
    )
    found["reference/command-line.md"] = _command_line()
    written = {f"reference/{path.name}": path.read_text(encoding="utf-8") for path in _written()}
    titles = {page: text.partition("\n")[0][2:] for page, text in {**found, **written}.items()}
    links = "\n".join(f"- [{title}]({Path(page).name})" for page, title in titles.items())
    found["reference/index.md"] = f"# Reference\n\nThe docstring of every public name.\n\n{links}\n"
    return found


def _written() -> list[Path]:
    """Return the pages of the reference that are in docs/."""
    return sorted((ROOT / "docs/reference").glob("*.md"))


def _public(module: str) -> tuple[str, ...]:
    """Return what `__all__` of a module says."""
    tree = ast.parse((ROOT.joinpath(*module.split(".")) / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return tuple(ast.literal_eval(node.value))
    raise ValueError(f"{module} has no __all__")


def _entries(title: str, module: str, names: tuple[str, ...]) -> str:
    entries = (f"::: {module}.{name}{_options(name)}" for name in names if name[0] != "_")
    return "\n\n".join([f"# {title}", *entries]) + "\n"


def _options(name: str) -> str:
    if name not in _OURS:
        return ""
    shown = f", members: [{', '.join(_HANDLE)}]" if name == "Handle" else ""
    return f"\n    options: {{merge_init_into_class: false{shown}}}"


def _command_line() -> str:
    """Return what the commands say of themselves."""
    from typer.testing import CliRunner

    from aiodist.cli import app

    names = [one.name or one.callback.__name__ for one in app.registered_commands if one.callback]
    parts = ["# Command line"]
    for name in names:
        told = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "110", "NO_COLOR": "1"}, prog_name="aiodist")
        parts.append(f"## aiodist {name}\n\n```text\n{told.output.strip()}\n```")
    return "\n\n".join(parts) + "\n"


# --- what MkDocs calls -------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add to the menu the pages that are made, and those of docs/design."""
    design = [str(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs/design").glob("*.md"))]
    _add({"Packages": design, "Examples": list(_examples()), "Reference": list(_reference())}, config.nav or [])
    return config


def _add(more: dict[str, list[str]], nav: list[Any]) -> None:
    """Append the pages of each named section to it, except those that the menu has already."""
    named = json.dumps(nav)
    for section in nav:
        if isinstance(section, dict):
            for title, entries in section.items():
                if isinstance(entries, list):
                    _add(more, entries)
                    entries += [page for page in more.get(title, []) if f'"{page}"' not in named]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for page, text in pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def _boost(page: str) -> float:
    """Return how much the search prefers a page."""
    if page.startswith("design") or page in ("contributing.md", "security.md"):
        return _MADE
    return 1 if "/" in page else _USED


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return a page with its drawings as pictures, and with links that lead to pages of the site."""
    from mkdocs.exceptions import PluginError

    page.meta.setdefault("search", {"boost": _boost(page.file.src_uri)})

    def picture(fence: re.Match[str]) -> str:
        path: Path = pictures.FOLDER / pictures.name_of(fence[1])
        if not path.exists():
            raise PluginError(f"a drawing of {page.file.src_uri} has no picture: make drawings, with Graphviz's dot")
        return f'<div class="drawing">{path.read_text(encoding="utf-8").replace(chr(10), "")}</div>\n'

    shown: str = pictures.FENCE.sub(picture, _linked(markdown))
    return f"{shown}\n\n{_TOOLTIPS}"


_WORKER = """// A browser starts no worker from a file of the disk: here is the text of the one that searches.
if (location.protocol === "file:") {
    const Original = Worker
    Worker = function () { return new Original(URL.createObjectURL(new Blob([%s]))) }
}
"""


def on_post_build(config: MkDocsConfig) -> None:
    """Make the search work on pages from the disk: its index and its worker become scripts."""
    site = Path(config.site_dir)
    index = (site / "search/search_index.json").read_text(encoding="utf-8")
    (site / "search/search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
    [worker] = (site / "assets/javascripts/workers").glob("search.*.js")
    (site / "search/worker.js").write_text(_WORKER % json.dumps(worker.read_text(encoding="utf-8")), encoding="utf-8")
