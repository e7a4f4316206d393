"""
Imports run one way: every package may import only from those that stand below it.

And they stand at the top of modules; those inside functions are listed, each with what it saves. Run it to
see them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

PACKAGE = Path(__file__).parent.parent / "src" / "pipegrid"
MAP = PACKAGE.parent.parent / "docs" / "explanation-architecture.md"

_FOUNDATION = {"errors", "version", "core", "flow", "reactor"}
_SHARED = _FOUNDATION | {"disk", "wire"}
_SERVERS = _SHARED | {"storage", "server"}
_CLIENTS = _SHARED | {"transport", "transfer"}

MAY_IMPORT = {
    "errors": set[str](),
    "state_table": set[str](),
    "version": set[str](),
    "argument_checks": {"errors"},
    "core": {"errors"},
    "flow": {"errors"},
    "reactor": {"errors"},
    "disk": {"errors", "core"},
    # Of the reactor's: which ciphers both ends speak.
    "wire": {"errors", "core", "reactor"},
    "http11": {"errors", "state_table", "flow", "reactor"},
    # A grid in virtual time is made of everything; the network below it needs the reactor alone.
    "testing": _SERVERS | _CLIENTS | {"grid", "tree"},
    "storage": _SHARED,
    "server": _SHARED | {"state_table", "storage"},
    # Of the client's, transport.local_server alone: it is a store in this process.
    "transport": _SHARED | {"http11", "storage"},
    "transfer": _SHARED | {"transport"},
    # A grid serves its local store, and `serve` is configured where clients are.
    "grid": _SERVERS | _CLIENTS,
    "tree": _SERVERS | _CLIENTS | {"grid"},
    "mirror": _FOUNDATION | {"disk", "http11"},
    "speedtest": _SERVERS | _CLIENTS | {"http11", "grid", "testing"},
    "buildbot": {"errors", "speedtest"},
    "gateway": _SERVERS | _CLIENTS | {"grid", "tree"},
    "mount": _SERVERS | _CLIENTS | {"grid", "tree"},
    "cli": _SERVERS | _CLIENTS | {"grid", "tree", "speedtest", "mirror", "gateway", "mount"},
    "__main__": {"cli"},
}

PURE = {
    "core": {"twisted", "time", "threading", "asyncio", "os", "io", "pathlib", "socket", "random"},
}


STARTUP = ("cli/__init__.py", "cli/startup/")
"""What runs before anything is loaded: it decides what is loaded, and when."""

MOST = 140
"""Imports of the package inside its functions, all together."""

EXCEPTIONS = {
    "cli/cmd_serve.py": "a server brings in all it imports, and invitations need a library of their own",
    "cli/completion.py": "a server in Twisted's own process spares what reads backups: 420 ms",
    "grid/tor_socks_settings.py": "a directory without a control port of Tor spares Twisted: 90 ms",
    "gateway/gateway_service.py": "a gateway without SFTP spares Twisted Conch: 85 ms",
    "grid/__init__.py": "whoever wants GridConfig alone spares the grid: 420 ms",
    "grid/server_opening.py": "a grid of servers over HTTPS spares Foolscap: 350 ms",
    "grid/file_grid.py": "one kind of transfer spares the others: 110 ms",
    "grid/open_grid.py": "a grid without introducers spares Foolscap and the storage server: 240 ms",
    "http11/request_sender.py": "requests whose body is no stream spare its sender: 5 ms",
    "mirror/fetch_run.py": "requests are sent before what stores the answers is loaded: 12 ms",
    "mirror/hash_cache.py": "a mirror that is new has no database yet: 12 ms",
    "mirror/connection_scheduler.py": "mirrors that never redirect spare the table of where to: 3 of 60 ms",
    "mirror/local_check.py": "arguments are explained only if they are wrong: 4 ms of a 60 ms command",
    "mirror/mirror_lists.py": "proxies are read only where a list of mirrors is fetched: 44 ms",
    "mirror/mirror_urls.py": "proxies are read only if the environment names one: 44 ms",
    "mirror/stat_cache.py": "an unchanged mirror is verified by names alone: 14 ms of 25 ms",
    "server/serve.py": "a server that announces itself nowhere spares the introducer's protocol: 27 ms",
    "speedtest/html_report.py": "charts need optional libraries: 650 ms",
    "speedtest/child_processes.py": "servers without an emulated link spare it: 80 ms",
    "transfer/put/source_opening.py": "a file that is known by its path spares what copies streams: 18 ms",
    "transport/gbs/response_outcomes.py": "immutable files spare messages of mutable ones, and surveys: 4 ms",
    "transport/gbs/requests.py": "immutable files spare the messages of mutable ones, and surveys: 3 ms",
    "tree/tree_grid.py": "single files spare directories, and one kind of work with trees the others",
    "tree/upload_store.py": "a put of a tree spares what checks it: 55 ms",
}
"""
By module, with the processor's time that is spared a program that does not get there.

Each was measured in a process that had loaded the module: the time to import what its functions import. A
put of a small file takes about 400 ms on the same machine.
"""


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def import_graph() -> dict[str, set[str]]:
    """Return which module of the package imports which, imports for types included."""
    paths = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        named = {
            name.removeprefix("pipegrid.") for name in imports(path) if name[:9] == "pipegrid."
        }
        homes = {name if name in paths else name.rpartition(".")[0] for name in named}
        graph[module] = homes & paths.keys() - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the groups of modules each of which can be reached from all others of its group."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for module in graph[ahead.pop()] - seen:
                seen.add(module)
                ahead.append(module)
        reached[start] = seen
    return {
        frozenset(other for other in graph if other in seen and module in reached[other])
        for module, seen in reached.items()
        if module in seen
    }


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


class LayersTests(SynchronousTestCase):
    """What design draws, the code keeps."""

    def test_imports_run_one_way(self) -> None:
        """No module imports from a layer above its own."""
        wrong = []
        for path in sorted(PACKAGE.rglob("*.py")):
            layer = path.relative_to(PACKAGE).with_suffix("").parts[0]
            if layer == "__init__":
                continue
            self.assertIn(layer, MAY_IMPORT, f"{path} stands in no known layer")
            for name in imports(path):
                parts = name.split(".")
                if parts[0] != "pipegrid" or len(parts) == 1:
                    continue
                if parts[1] not in MAY_IMPORT[layer] | {layer, "argument_checks"}:
                    wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
        self.assertEqual(wrong, [])

    def test_no_circles(self) -> None:
        """No modules import each other, not even for types."""
        self.assertEqual(circles(import_graph()), set())

    def test_circles_are_found(self) -> None:
        """A circle of three is one; what only leads into it is not of it."""
        graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str](), "e": {"a"}}
        self.assertEqual(circles(graph), {frozenset("abc")})

    def test_the_map_is_of_this_house(self) -> None:
        """Every module that the map names is there, and every package is on it."""
        text = MAP.read_text("utf-8")
        named = re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.py)`", text)
        homes = (PACKAGE, PACKAGE.parent.parent)
        missing = [name for name in named if not any((home / name).is_file() for home in homes)]
        self.assertEqual(missing, [])
        self.assertGreater(len(named), 40)
        packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
        self.assertEqual({name for name in packages if f"{name}/" not in text}, set())

    def test_the_core_is_pure(self) -> None:
        """The core touches no reactor, clock, file or thread."""
        wrong = [
            f"{path.relative_to(PACKAGE)} imports {name}"
            for layer, forbidden in PURE.items()
            for path in sorted((PACKAGE / layer).rglob("*.py"))
            for name in imports(path)
            if name.split(".")[0] in forbidden
        ]
        self.assertEqual(wrong, [])


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
