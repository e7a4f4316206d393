"""Imports stand at the top of modules; those inside functions are listed, each with what it saves."""

from __future__ import annotations

import ast
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

PACKAGE = Path(__file__).parent.parent / "src" / "pipegrid"

STARTUP = ("cli/__init__.py", "cli/startup/")
"""What runs before anything is loaded: it decides what is loaded, and when."""

MOST = 140
"""Imports of the package inside its functions, all together."""

EXCEPTIONS = {
    "core/erasure.py": "ISA-L is optional, and decided on when a file is coded",
    "grid/__init__.py": "whoever wants GridConfig alone spares the grid: 420 ms",
    "grid/configured_servers.py": "a grid of servers over HTTPS spares Foolscap: 350 ms",
    "grid/grid.py": "one kind of transfer spares the others: 110 ms",
    "grid/open_grid.py": "a grid without introducers spares Foolscap and the storage server: 240 ms",
    "http11/request_writer.py": "requests whose body is no stream spare its sender: 5 ms",
    "mirror/epoll_driver.py": "requests are sent before what stores the answers is loaded: 12 ms",
    "mirror/hash_cache.py": "a mirror that is new has no database yet: 12 ms",
    "mirror/local_check.py": "arguments are explained only if they are wrong: 4 ms of a 60 ms command",
    "mirror/mirror_http.py": "proxies are read only if the environment names one: 44 ms",
    "mirror/quick_check.py": "an unchanged mirror is verified by names alone: 14 ms of 25 ms",
    "server/serve.py": "a server that announces itself nowhere spares the introducer's protocol: 27 ms",
    "speedtest/html_report.py": "charts need optional libraries: 650 ms",
    "speedtest/server_processes.py": "servers without an emulated link spare it: 80 ms",
    "transfer/put/source_opener.py": "a file that is known by its path spares what copies streams: 18 ms",
    "transport/gbs/answers.py": "immutable files spare the messages of mutable ones, and surveys: 4 ms",
    "transport/gbs/requests.py": "immutable files spare the messages of mutable ones, and surveys: 3 ms",
    "tree/tree_grid.py": "single files spare directories, and one kind of work with trees the others: 150 ms",
    "tree/tree_store.py": "a put of a tree spares what checks it: 55 ms",
}
"""
By module, with the processor's time that is spared a program that does not get there.

Each was measured in a process that had loaded the module: the time to import what its functions import. A
put of a small file takes about 400 ms on the same machine.
"""


def local_imports() -> dict[str, int]:
    """Return how many imports of the package stand inside functions, by module."""
    found: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = {
            node
            for function in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for node in ast.walk(function)
            if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipegrid"))
            or (isinstance(node, ast.Import) and node.names[0].name.startswith("pipegrid"))
        }
        if inside:
            found[path.relative_to(PACKAGE).as_posix()] = len(inside)
    return found


class LocalImportsTests(SynchronousTestCase):
    """A reader sees at the top of a module what it needs."""

    def test_exceptions_are_listed(self) -> None:
        """No others, and none that is gone."""
        found = {name for name in local_imports() if not name.startswith(STARTUP)}
        self.assertEqual(found, set(EXCEPTIONS))

    def test_they_are_few(self) -> None:
        """Those of the start included."""
        self.assertLessEqual(sum(local_imports().values()), MOST)


if __name__ == "__main__":
    for module, count in local_imports().items():
        print(f"{count:3} {module}: {EXCEPTIONS.get(module, 'start')}")
