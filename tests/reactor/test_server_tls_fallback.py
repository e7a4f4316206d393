"""Which TLS carries bulk data: ours as long as all names are there that it uses, else Twisted's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from OpenSSL import SSL
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.utils import getProcessOutputAndValue
from twisted.logger import globalLogPublisher
from twisted.protocols import tls as twisted_tls
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.reactor import bulk_tls
from pipegrid.reactor.bulk_tls import BatchingTLSFactory
from tests.reactor.test_server_tls import WHO
from tests.scratch import scratch_path
from tests.test_layers import imports

HOME = Path(__file__).parent.parent.parent
WITH_TLS = (
    "tests.transport.test_foolscap_hostile",
    "tests.transport.test_foolscap_loopback",
    "tests.transport.test_foolscap_negotiation",
    "tests.transport.test_gbs",
)
"""Where transports are tested with TLS."""
BRING_TLS = (
    "pipegrid.reactor.bulk_tls",
    "pipegrid.server.listener",
    "pipegrid.server.identity",
    "pipegrid.server.serve",
    "pipegrid.transport.foolscap.link.TubConnector",
)
"""What asks which TLS it is, and what brings that."""


class Transport:
    """With whatever protocol."""


class ChoiceTests(SynchronousTestCase):
    """What is looked at, and what comes of it."""

    def setUp(self) -> None:
        bulk_tls.is_ours.cache_clear()
        self.addCleanup(bulk_tls.is_ours.cache_clear)
        self.lines: list[Any] = []
        note: Any = self._note
        globalLogPublisher.addObserver(note)
        self.addCleanup(globalLogPublisher.removeObserver, note)

    def _note(self, event: Any) -> None:
        if event.get("log_namespace") == "pipegrid.reactor.bulk_tls":
            self.lines.append(event["name"])

    def factory(self) -> Any:
        """Return one for servers."""
        return bulk_tls.tls_factory(WHO.contexts(), False, Factory(), Clock())

    def test_ours(self) -> None:
        """With the releases that are installed it is ours, and nothing is said."""
        self.assertIsNone(bulk_tls.what_is_missing())
        self.assertIsInstance(self.factory(), BatchingTLSFactory)
        self.assertEqual(self.lines, [])

    def test_no_library(self) -> None:
        """No way to OpenSSL at all."""
        self.patch(SSL, "_lib", None)
        self.assertEqual(bulk_tls.what_is_missing(), "OpenSSL.SSL._ffi and _lib")

    def test_a_function_of_another_type(self) -> None:
        """A name that stands for something else is as bad as none."""

        class Library:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, "BIO_read" if name == "SSL_read" else name)

        real: Any = SSL._lib  # type: ignore[attr-defined]
        self.patch(SSL, "_lib", Library())
        self.assertEqual(bulk_tls.what_is_missing(), "OpenSSL.SSL._lib.SSL_read")

    def test_twisted_has_renamed_something(self) -> None:
        """Twisted's private names are looked at, too."""

        class Other(twisted_tls.BufferingTLSTransport):
            _shutdownTLS: Any = None

        self.patch(twisted_tls, "BufferingTLSTransport", Other)
        missing = "twisted.protocols.tls.BufferingTLSTransport._shutdownTLS"
        self.assertEqual(bulk_tls.what_is_missing(), missing)

    def test_twisteds_own_and_one_line(self) -> None:
        """However many connections there are, the log has one line of it; what was started stays as it is."""
        self.patch(bulk_tls, "FIELDS", {"_into_ssl": "another type *"})
        for _ in range(3):
            factory = self.factory()
            self.assertIsInstance(factory, twisted_tls.TLSMemoryBIOFactory)
            self.assertNotIsInstance(factory, BatchingTLSFactory)
            self.assertIs(factory.protocol, twisted_tls.BufferingTLSTransport)
        transport: Any = Transport()
        transport.protocol = twisted_tls.BufferingTLSTransport(factory, Protocol(), False)
        bulk_tls.upgrade_started_tls(transport)
        self.assertNotIn("_write", vars(transport.protocol))
        context: Any = object()
        bulk_tls.write_whole(context)
        self.assertEqual(self.lines, ["OpenSSL.SSL.Connection._into_ssl"])

    def test_no_class_is_changed(self) -> None:
        """TLS that runs already is given methods; what it is stays what Twisted made it."""
        names = "__" + "class" + "__ ="
        changed = [
            path.name
            for path in (HOME / "src").rglob("*.py")
            if names in path.read_text("utf-8")
            and path.name != "lazy_modules.py"  # Python's way there
        ]
        self.assertEqual(changed, [])


class OtherPyOpenSSLTests(TestCase):
    """
    A pyOpenSSL with other private names.

    Tests that begin no TLS never ask which one it is, and would only be run a second time.
    """

    timeout = 900  # seconds, where nothing else runs

    def test_every_transport_with_tls(self) -> Deferred[None]:
        """Every test of a transport that begins TLS passes with Twisted's own."""
        return Deferred.fromCoroutine(self._run_renamed(*WITH_TLS))

    def test_which_begin_tls(self) -> None:
        """No other module of the transports' tests has what TLS comes from; each of these does."""
        found = {
            f"tests.transport.{path.stem}"
            for path in (HOME / "tests/transport").glob("*.py")
            if any(name.startswith(BRING_TLS) for name in imports(path))
        }
        self.assertEqual(found, set(WITH_TLS))

    async def _run_renamed(self, *suites: str) -> None:
        own = str(scratch_path(self))
        arguments = ["-m", "tests.renamed_pyopenssl", "--temp-directory", own, *suites]
        environment = {**os.environ, "PYTHONPATH": f"{HOME / 'src'}:{HOME}"}
        out, errors, status = await getProcessOutputAndValue(
            sys.executable, arguments, environment, str(HOME)
        )
        self.assertEqual(status, 0, (out + errors)[-4000:].decode())
