"""Which servers are connected to before the grid is open."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import subprocess
import sys
import threading
from pathlib import Path

from misc.command import environment
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.startup.preconnect_servers import addresses_in, dial
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.grid.servers_and_introducers_yaml import parse_static_servers
from pipegrid.reactor.preconnect import MOST

PIN = "A" * 43
ENTRY = """
  v0-{number}:
    ann:
      nickname: storage {number}
      anonymous-storage-FURL: pb://{tub}@tcp:10.0.0.{number}:3456/swissnum
      anonymous-storage-NURLs:
        - {quote}pb://{pin}@{host}:{port}/{swissnum}#v=1{quote}
"""


def entry(number: int, host: str, port: int = 3457, quote: str = "") -> str:
    """Return one server's part of a ``servers.yaml``."""
    return ENTRY.format(
        number=number, pin=PIN, tub="a" * 32, host=host, port=port, swissnum="s" * 32, quote=quote
    )


def configured(directory: Path) -> None:
    """Make it a client's directory that names no servers yet."""
    (directory / "private").mkdir(parents=True)
    (directory / "pipegrid.cfg").write_text("[client]\n")


class AddressesTests(SynchronousTestCase):
    """``addresses_in``."""

    def test_as_the_file_is_read_later(self) -> None:
        """It names the servers that reading it as what it is names, those with a name apart."""
        text = "storage:" + "".join(
            (
                entry(1, "10.0.0.1"),
                entry(2, "[2001:db8::7]", quote='"'),
                entry(3, "storage.example.org"),
                entry(4, "10.0.0.4", 65535, quote="'"),
            )
        )
        data = text.encode("ascii")
        servers = parse_static_servers(data, "servers.yaml").servers
        there = [(each.nurl.host, each.nurl.port) for each in servers if each.nurl is not None]
        self.assertEqual(len(there), 4)
        self.assertEqual(
            addresses_in(data), [each for each in there if each[0] != "storage.example.org"]
        )
        # Quoted all in one line, as JSON is.
        flow = f'{{"a": ["pb://{PIN}@1.2.3.4:1/s#v=1", "pb://{PIN}@1.2.3.5:2/s#v=1"]}}'
        self.assertEqual(addresses_in(flow.encode()), [("1.2.3.4", 1), ("1.2.3.5", 2)])

    def test_what_is_none(self) -> None:
        """Comments, Foolscap, Tor, other versions, impossible ports, and nothing."""
        for text in (
            "",
            "storage: {}",
            f"  # - pb://{PIN}@10.0.0.1:1/s#v=1",
            f"- pb://{PIN}@tcp:10.0.0.1:1/s",
            f"- pb+tor://{PIN}@10.0.0.1:1/s#v=1",
            f"- pb://{PIN}@10.0.0.1:1/s#v=2",
            f"- pb://{PIN}@10.0.0.1:0/s#v=1",
            f"- pb://{PIN}@10.0.0.1:65536/s#v=1",
            "\x00\xff" * 100,
        ):
            self.assertEqual(addresses_in(text.encode("latin-1")), [], text)

    def test_many(self) -> None:
        """With more servers than are dialled nobody knows yet which ones are wanted."""
        for count, expected in ((MOST, MOST), (MOST + 1, 0)):
            text = "".join(entry(number, f"10.0.0.{number}") for number in range(count))
            self.assertEqual(len(addresses_in(text.encode("ascii"))), expected)


class DialTests(SynchronousTestCase):
    """``dial``."""

    def test_nothing_to_dial(self) -> None:
        """No directory, no file, none that can be read, one that is too large: whoever opens it tells."""
        directory = Path(self.mktemp())
        self.assertIs(dial(directory), None)
        configured(directory)
        self.assertIs(dial(directory), None)
        (directory / SERVERS_NAME).write_text(entry(1, "127.0.0.1", 9) + " " * 70_000, "ascii")
        self.assertIs(dial(directory), None)
        (directory / SERVERS_NAME).unlink()
        (directory / SERVERS_NAME).mkdir()
        self.assertIs(dial(directory), None)

    def test_what_looks_like_an_address(self) -> None:
        """A slip in an entry takes no other away, and is not looked up as a name: whoever opens it tells."""

        def refuse(*_arguments: object) -> None:
            raise AssertionError("looked up")

        self.patch(socket, "getaddrinfo", refuse)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            directory = Path(self.mktemp())
            configured(directory)
            hosts = ("..", "300.1.1.1", "1.2.3", "[1::2::3]", "[:]", "[12345::]", "127.0.0.1")
            port = listening.getsockname()[1]
            text = "".join(entry(number, host, port) for number, host in enumerate(hosts))
            (directory / SERVERS_NAME).write_text(text, "ascii")
            ahead = dial(directory)
            assert ahead is not None
            self.addCleanup(ahead.close)
            self.assertEqual(list(ahead._on_their_way), [("127.0.0.1", port)])

    def test_without_files_or_threads(self) -> None:
        """Nothing is made ahead, nor stays open of it; the command goes on as long as it can."""
        directory = Path(self.mktemp())
        configured(directory)
        (directory / SERVERS_NAME).write_text(entry(1, "127.0.0.1", 9), "ascii")

        def refuse(*_arguments: object, **_more: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        def refuse_threads(*_arguments: object) -> None:
            raise RuntimeError("can't start new thread")

        for place, name, refusal in (
            (selectors, "DefaultSelector", refuse),
            (socket, "socketpair", refuse),
            (threading.Thread, "start", refuse_threads),
        ):
            patched = self.patch(place, name, refusal)
            before = set(os.listdir("/dev/fd"))
            self.assertIs(dial(directory), None)
            self.assertLessEqual(set(os.listdir("/dev/fd")), before)
            patched.restore()

    def test_before_all_else(self) -> None:
        """It imports neither Twisted nor what describes servers; with nobody to connect to, no TLS either."""
        code = (
            "import sys; begun = set(sys.modules)\n"  # zope.interface 6.2 has zope there from the first
            "import pipegrid.cli.startup.preconnect_servers as dialling\n"
            "dialling.dial('/nowhere')\n"
            "print(*(each for each in ('ssl', 'socket') if each in sys.modules))\n"
            "import pipegrid.reactor.preconnect, pipegrid.reactor.tls_settings\n"
            "print(*sorted(each for each in set(sys.modules) - begun"
            " if each.split('.')[0] in ('attr', 'attrs', 'twisted', 'yaml', 'zope')))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        self.assertEqual(done.stdout.strip(), "")
