"""Settings of a Tahoe-LAFS node that cannot be followed: commands end before they send anything."""

from __future__ import annotations

import selectors
import socket
import threading
from pathlib import Path

from pipegrid.core import base32
from tests.cli.processes import ProcessTestCase
from tests.grid.test_tahoe_settings_check import REFUSED, entry, make_node


class Listener:
    """A port, and how many connections it was offered; each is closed at once."""

    def __init__(self) -> None:
        self.count = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                if any(key.fileobj is self._woken for key, _ in selector.select()):
                    return
                self._socket.accept()[0].close()
                self.count += 1

    def close(self) -> None:
        """Stop; nothing is listening afterwards."""
        self._wake.send(b".")
        self._thread.join()
        for each in (self._socket, self._wake, self._woken):
            each.close()


class RefusedSettingsTests(ProcessTestCase):
    """The real command, a node's directory, and a port in the place of its server and its introducer."""

    def setUp(self) -> None:
        super().setUp()
        self.listener = Listener()
        self.addCleanup(self.listener.close)
        (self.home / "file").write_bytes(b"x" * 100)

    def node(self, text: str, servers: str = "") -> Path:
        """Make the directory, of which all servers are the one port."""
        place = f"127.0.0.1:{self.listener.port}"
        servers = (servers or entry()).replace("127.0.0.1:9", place)
        node = make_node(self.home / "node", text, servers)
        (node / "private" / "introducers.yaml").write_text(
            f"introducers:\n  far: {{furl: 'pb://{base32.encode(b't' * 20)}@tcp:{place}/i'}}\n"
        )
        return node

    def test_without_them_the_servers_are_asked(self) -> None:
        """Which shows that connections are counted."""
        node = self.node("[connections]\ntcp = tcp\n")
        self.run_command("-d", str(node), "put", "--happy", "1", "file", status=3)
        self.assertGreater(self.listener.count, 0)

    def test_every_setting(self) -> None:
        """Status 2, one sentence with its name, and not one connection."""
        for section, name, value in REFUSED:
            node = self.node(f"[{section}]\n{name} = {value}\n")
            self.assert_refused(node, "put", "file", named=f"[{section}] {name}")
        for text in ("[node]\nreveal-IP-adress = false\n", "[x]\ny = z\n"):
            self.assert_refused(self.node(text), "put", "file", named="tahoe.cfg:")

    def test_ways_to_one_server(self) -> None:
        """So are those of ``servers.yaml``."""
        for ways in ("{tcp: i2p}", "{tor: tcp}"):
            node = self.node("", entry(ways))
            self.assert_refused(node, "put", "file", named="'connections' are")

    def test_every_command(self) -> None:
        """It does not matter what the command is; ``init --tahoe`` makes nothing."""
        node = self.node("[i2p]\nlaunch = true\n")
        for command in (
            ("get", f"URI:CHK:{'a' * 26}:{'a' * 52}:1:1:100"),
            ("check", f"URI:CHK:{'a' * 26}:{'a' * 52}:1:1:100"),
            ("status",),
            ("mkdir",),
            ("serve", "--port", "tcp:0:interface=127.0.0.1"),
        ):
            self.assert_refused(node, *command, named="[i2p] launch is 'true'")
        self.run_command("-d", "own", "init", "--tahoe", str(node), status=2)
        self.assertFalse((self.home / "own").exists())
        self.assertEqual(self.listener.count, 0)

    def assert_refused(self, node: Path, *command: str, named: str) -> None:
        """One sentence, status 2, no connection."""
        out, err = self.run_command("-d", str(node), *command, status=2)
        self.assertEqual((out, err.count("\n")), ("", 1))
        self.assertIn(named.lower(), err.lower())
        self.assertEqual(self.listener.count, 0, named)
