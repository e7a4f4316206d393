"""The programs in the documentation can be run: what they use they import, and what they serve is whole."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.server import Site

DOCS = Path(__file__).parent.parent / "docs"

_BLOCK = re.compile(r"^```python(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def programs(page: Path) -> Iterator[tuple[str | None, str]]:
    """Yield the programs of a page, and the names of those that have one."""
    for name, text in _BLOCK.findall(page.read_text("utf-8")):
        yield name or None, text


def tree_of(text: str) -> ast.Module:
    """Take a program apart, which may await where no function is."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(text, "a page", "exec", flags)
    assert isinstance(tree, ast.Module)
    return tree


def missing(page: Path) -> set[str]:
    """Return names of classes that are used on a page and not bound there, and imports that do not exist."""
    used: set[str] = set()
    bound = set(dir(builtins))
    for _, text in programs(page):
        for node in ast.walk(tree_of(text)):
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                module = importlib.import_module(node.module)
                used |= {each.name for each in node.names if not hasattr(module, each.name)}
                bound |= {each.asname or each.name for each in node.names}
            elif isinstance(node, ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.Name) and node.id[:1].isupper():
                used.add(node.id)
    return used - bound


class BrokenOff:
    """A grid whose files cannot be fetched further than their first bytes."""

    def __init__(self) -> None:
        self.fetching: Deferred[None] = Deferred()

    def get(self, cap: str, request: Any) -> Deferred[None]:
        """Write a beginning; the rest fails with ``fetching``."""
        request.write(b"the first bytes")
        return self.fetching


class ProgramsTests(SynchronousTestCase):
    """As they stand on the pages."""

    def test_what_they_import(self) -> None:
        """Whoever copies a program, with what stands above it, has all that it names."""
        found = {page.name: sorted(missing(page)) for page in sorted(DOCS.glob("*.md"))}
        self.assertEqual({page: names for page, names in found.items() if names}, {})

    def test_a_file_that_breaks_off(self) -> None:
        """Who fetches a file from the web server of the how-to notices that the rest of it is missing."""
        program = dict(programs(DOCS / "how-to-library.md"))["serve.py"]
        namespace: dict[str, Any] = {"__name__": "serve"}
        exec(compile(program, "serve.py", "exec"), namespace)
        grid = BrokenOff()
        site: Any = Site(namespace["Files"](grid), timeout=None)
        site.noisy = False
        transport = StringTransport()
        protocol = site.buildProtocol(None)
        protocol.makeConnection(transport)
        protocol.dataReceived(b"GET /URI:CHK:x HTTP/1.1\r\nHost: a.example\r\n\r\n")
        grid.fetching.errback(ZeroDivisionError())
        sent = transport.value()
        self.assertIn(b"Transfer-Encoding: chunked", sent)
        self.assertIn(b"the first bytes", sent)
        self.assertNotIn(b"\r\n0\r\n", sent)
        self.assertTrue(transport.disconnecting)
