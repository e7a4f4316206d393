"""Imports run one way: every package may import only from those that stand to its left."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

PACKAGE = Path(__file__).parent.parent / "src" / "pipegrid"

MAY_IMPORT = {
    "errors": set[str](),
    "core": {"errors"},
    "wire": {"errors", "core"},
    "flow": {"errors"},
    "http11": {"errors", "flow"},
    "storage": {"errors", "core", "wire", "flow"},
    "transport": {"errors", "core", "wire", "storage", "flow", "http11"},
    "transfer": {"errors", "core", "wire", "flow", "transport"},
    "grid": {"errors", "core", "wire", "flow", "storage", "transport", "transfer"},
    "simulation": {
        "errors",
        "core",
        "wire",
        "flow",
        "http11",
        "storage",
        "transport",
        "transfer",
        "grid",
    },
    "speedtest": {
        "errors",
        "core",
        "wire",
        "flow",
        "http11",
        "storage",
        "transport",
        "transfer",
        "grid",
        "simulation",
    },
    "buildbot": {"errors", "speedtest"},
    "cli": {
        "errors",
        "core",
        "wire",
        "flow",
        "storage",
        "transport",
        "transfer",
        "grid",
        "speedtest",
    },
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
                if parts[1] not in MAY_IMPORT[layer] | {layer, "__version__"}:
                    wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
        self.assertEqual(wrong, [])

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
