"""Imports run one way: every package may import only from those that stand below it."""

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
    "arguments": {"errors"},
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
    "cli": _SERVERS | _CLIENTS | {"grid", "tree", "speedtest", "mirror"},
    "__main__": {"cli"},
}

PURE = {
    "core": {"twisted", "time", "threading", "asyncio", "os", "io", "pathlib", "socket", "random"},
}


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
                if parts[1] not in MAY_IMPORT[layer] | {layer, "arguments"}:
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
