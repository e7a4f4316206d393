"""Private names of other libraries: each is looked at before it is used, and without it all works as well."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import OpenSSL
from OpenSSL import SSL
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.protocols import tls as twisted_tls
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from pipegrid.reactor import bulk_tls, tcp_transport
from pipegrid.reactor.process_settings import make_monotonic
from pipegrid.wire import foolscap_broker
from tests.reactor.test_server_tls import WHO
from twisted import protocols

PACKAGE = Path(bulk_tls.__file__).parent.parent

CHECKED = {
    "reactor/bulk_tls.py": {
        *bulk_tls.FIELDS,
        *bulk_tls.CALLED,
        *bulk_tls.TWISTED,
        *bulk_tls.STATE,
    },
    "reactor/tcp_transport.py": set(tcp_transport.SOCKET_NAMES),
}
"""What is used without another look, by module, and what has looked before."""
LOOKED_AT = {
    "grid/wormhole_exchange.py": {"_interfaces", "_boss", "_RC"},
    "reactor/bulk_tls.py": {"_ffi", "_lib"},
    "reactor/tcp_transport.py": {"_tempDataLen"},
    "reactor/process_settings.py": {"_newTimedCalls", "_pendingTimedCalls"},
    "wire/foolscap_broker.py": {"_getMethodInfo"},
}
"""What is asked for where it is used, with something else for where it is not."""
OF_PYTHON = {"_asdict", "_exit", "_Hash"}
"""``os._exit`` and ``_asdict`` are documented; ``hashlib._Hash`` is the types' alone. So are modules of C."""
MODULES_OF_PYTHON = {"_signal", "_socket"}


def private(name: str) -> bool:
    """Whether it is private, and no name that Python gives a meaning."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.AST) -> set[str]:
    """Return all names that a module gives to something."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def used(tree: ast.AST) -> Iterator[str]:
    """Yield private names that a module asks objects for, or imports from other packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("pipegrid"):
            if node.module not in MODULES_OF_PYTHON:
                yield from (node.module or "").split(".")
                yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            yield str(getattr(node.args[1], "value", ""))


class ScanTests(SynchronousTestCase):
    """The source."""

    def test_every_one_is_known(self) -> None:
        """What no module of ours defines belongs to others, and is in a table of what is looked at."""
        trees = {
            str(path.relative_to(PACKAGE)): ast.parse(path.read_text("utf-8"))
            for path in PACKAGE.rglob("*.py")
        }
        ours = set().union(*(defined(tree) for tree in trees.values()))
        for name, tree in trees.items():
            # These stand on objects of others: a name of another module of ours is no excuse there.
            known = defined(tree) if name in CHECKED else ours
            foreign = {each for each in used(tree) if private(each)} - known
            foreign -= OF_PYTHON | MODULES_OF_PYTHON
            allowed = CHECKED.get(name, set()) | LOOKED_AT.get(name, set())
            self.assertEqual(foreign - allowed, set(), name)

    def test_tables_have_no_more(self) -> None:
        """What is looked at is used."""
        for name, names in (*CHECKED.items(), *LOOKED_AT.items()):
            text = (PACKAGE / name).read_text("utf-8")
            for each in names:
                self.assertRegex(text, rf"\b{each}\b")


def renamed(module: ModuleType, name: str, other: str) -> ModuleType:
    """Return a module again, with another name for one of its own in all its source."""
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    loader: Any = spec.loader
    source, count = re.subn(rf"\b{name}\b", other, loader.get_source(module.__name__))
    assert count, name
    made = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {module.__name__: made}):  # dataclasses look there
        exec(compile(source, str(spec.origin), "exec"), made.__dict__)
    return made


@implementer(IOpenSSLClientConnectionCreator)
class Client:
    """TLS of somebody who trusts everybody."""

    def clientConnectionForTLS(self, _: object) -> SSL.Connection:
        """Return it."""
        return SSL.Connection(SSL.Context(SSL.TLS_METHOD), None)


class Listener(Protocol):
    """Keeps what comes."""

    data = b""

    def dataReceived(self, data: bytes) -> None:
        """Keep it."""
        self.data += data


class RenamedTests(SynchronousTestCase):
    """Another release with another name: TLS is Twisted's own, and carries data both ways."""

    def setUp(self) -> None:
        bulk_tls.is_ours.cache_clear()
        self.addCleanup(bulk_tls.is_ours.cache_clear)

    def twisted_with(self, name: str, other: str) -> Any:
        """Have Twisted's TLS with another name from now on, until the test ends; returns its module."""
        made = renamed(twisted_tls, name, other)
        self.patch(protocols, "tls", made)
        patching = mock.patch.dict(sys.modules, {"twisted.protocols.tls": made})
        patching.start()
        self.addCleanup(patching.stop)
        bulk_tls.is_ours.cache_clear()
        return made

    def carry(self) -> str:
        """Move data both ways between a client and a server; returns whose TLS it was."""
        clock = Clock()
        anyone: Any = Client()
        found = []
        for contexts, is_client in ((WHO.contexts(), False), (anyone, True)):
            factory = bulk_tls.tls_factory(contexts, is_client, Factory(), clock)
            end = factory.protocol(factory, Listener())
            end.makeConnection(StringTransport())
            found.append(end)
        server, client = found
        large = bytes(range(256)) * 1000
        client.write(large)
        server.write(b"small")
        for _ in range(10):
            clock.advance(0)
            for one, other in ((client, server), (server, client)):
                data = one.transport.value()
                one.transport.clear()
                if data:
                    other.dataReceived(data)
        self.assertEqual(server.wrappedProtocol.data, large)
        self.assertEqual(client.wrappedProtocol.data, b"small")
        return type(server).__module__

    def test_none(self) -> None:
        """As things are it is ours."""
        self.assertEqual(self.carry(), "pipegrid.reactor.bulk_tls")

    def test_each_of_twisteds(self) -> None:
        """Each is missed, whether it is a method or not."""
        for name in (*bulk_tls.TWISTED, *bulk_tls.STATE):
            made = self.twisted_with(name, f"{name}2")
            missing = f"twisted.protocols.tls.BufferingTLSTransport.{name}"
            self.assertEqual(bulk_tls.what_is_missing(), missing)
            self.assertEqual(self.carry(), made.__name__)
            self.assertFalse(bulk_tls.is_ours())

    def test_another_argument(self) -> None:
        """A method that wants more than it is given is not what it was."""
        self.twisted_with(r"def _flushReceiveBIO\(self", "def _flushReceiveBIO(self, size")
        missing = "twisted.protocols.tls.BufferingTLSTransport._flushReceiveBIO"
        self.assertEqual(bulk_tls.what_is_missing(), missing)

    def test_it_does_not_begin(self) -> None:
        """Nor is one that cannot be tried."""
        self.patch(twisted_tls.TLSMemoryBIOProtocol, "makeConnection", lambda self, where: 1 / 0)
        self.assertIn("BufferingTLSTransport.", bulk_tls.what_is_missing() or "")

    def test_each_of_pyopenssls(self) -> None:
        """The same; that data is carried without them shows ``tests.renamed_pyopenssl``."""
        for name in (*bulk_tls.FIELDS, *bulk_tls.CALLED, "_ffi", "_lib"):
            self.patch(OpenSSL, "SSL", renamed(SSL, name, f"{name}2"))
            missing = bulk_tls.what_is_missing()
            self.assertIn(name, missing or "")
            self.assertIn("OpenSSL.SSL.", missing or "")


class SocketTests(SynchronousTestCase):
    """Twisted's sockets."""

    def test_each_name(self) -> None:
        """Without any of them what is written goes the transport's own way."""
        whole: dict[str, Any] = {name: [] for name in tcp_transport.SOCKET_NAMES}
        self.assertIsNotNone(tcp_transport.socket_of(type("Socket", (), dict(whole))()))
        for name in tcp_transport.SOCKET_NAMES:
            less = {each: value for each, value in whole.items() if each != name}
            self.assertIsNone(tcp_transport.socket_of(type("Socket", (), less)()), name)
            outlet = tcp_transport.Outlet(tcp_transport.socket_of(type("Socket", (), less)()))
            transport = StringTransport()
            outlet.send(memoryview(b"encrypted"), transport)
            self.assertEqual(transport.value(), b"encrypted")

    def test_how_much_waits(self) -> None:
        """Where nobody tells, nothing does."""
        self.assertEqual(tcp_transport.unsent_bytes(object()), 0)


class OthersTests(SynchronousTestCase):
    """Reactors, Foolscap."""

    def test_a_reactor(self) -> None:
        """It counts as it should, though nobody knows what it was asked for before."""
        reactor = SimpleNamespace(seconds=lambda: 0.0)
        make_monotonic(reactor)
        self.assertNotEqual(reactor.seconds(), 0.0)

    def test_foolscap(self) -> None:
        """The call goes Foolscap's own way."""
        reference: Any = SimpleNamespace()
        broker: Any = SimpleNamespace(disconnected=False, is_idle=lambda: True)
        self.assertIsNone(foolscap_broker._call_at_once(reference, broker, "get", ()))
