"""No module imports, be it for its types alone or later, what imports that module."""

from __future__ import annotations

import grimp


def test_only_the_modules_of_shm_import_one_another() -> None:
    graph = grimp.build_graph("aiodist")
    for imported in graph.find_modules_directly_imported_by("aiodist"):  # when its names are first used
        graph.remove_import(importer="aiodist", imported=imported)
    in_cycles = {
        module
        for module in graph.modules
        if graph.find_upstream_modules(module) & graph.find_downstream_modules(module)
    }
    assert in_cycles == {"aiodist.backends.shm.messages", "aiodist.backends.shm.peers"}
