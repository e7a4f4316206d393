"""The head start: mirrors are on their way before most of Python is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

from misc.command import environment
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.startup import fast_mirror_args
from pipegrid.errors import UsageError
from pipegrid.mirror import mirror_urls
from pipegrid.mirror.epoll_socket_cache import SocketCache
from pipegrid.mirror.preconnect_mirrors import (
    LONG_LIST_BYTES,
    EarlySockets,
    connections_for,
    plain_url,
)
from tests.mirror.test_sprint import Server

NOT_YET = ("click", "hashlib", "pipegrid.cli.console", "signal", "socket", "ssl", "typing")
"""What takes a millisecond and more, and nobody needs to connect."""

NOT_BEFORE_ASKED = (
    *("click", "ctypes", "hashlib", "pathlib", "queue", "socket", "ssl", "threading", "typing"),
)
"""The same of the first request."""

_COMMAND = """
import json, sys, _socket
asked = []
class Noting(_socket.socket):
    def send(self, data):
        asked.append(sorted(sys.modules))
        return super().send(data)
_socket.socket = Noting
from pipegrid.mirror import preconnect_mirrors as headstart
begin, loaded = headstart.begin, []
def noted(place):
    loaded.append(sorted(sys.modules))
    return begin(place)
headstart.begin = noted
from pipegrid.cli import main
sys.settrace(lambda *_: None)  # so that the process ends the long way
try:
    main()
finally:
    print(json.dumps([loaded, asked[:1]]), file=sys.stderr)
"""


class HeadStartTests(SynchronousTestCase):
    """With servers and processes of their own."""

    def setUp(self) -> None:
        self.files = {f"pool/{n:04}/file-with-a-name.deb": b"%d" % n for n in range(400)}
        self.dest = Path(self.mktemp())
        self.server = Server(self.files)
        self.addCleanup(self.server.close)
        self.asked: list[list[str]] = []
        self.list = Path(self.mktemp())
        self.list.write_text(
            "".join(
                f"{sha256(data).hexdigest()} {len(data)} {path}\n"
                for path, data in self.files.items()
            )
        )
        assert self.list.stat().st_size >= LONG_LIST_BYTES

    def mirror(self, *options: str) -> tuple[int, str, list[set[str]]]:
        """Run ``mirror list``: status, what it says, and of each connection what was loaded by then."""
        line = ("--json", "mirror", "list", str(self.list), str(self.dest), *options)
        surroundings = {
            name: value
            for name, value in environment().items()
            if not name.lower().endswith("_proxy")
        }
        done = subprocess.run(
            [sys.executable, "-c", _COMMAND, *line],
            env=surroundings,
            capture_output=True,
            text=True,
            timeout=60,
        )
        *_, told = done.stderr.splitlines()
        loaded, self.asked = json.loads(told)
        return done.returncode, done.stdout, [set(each) for each in loaded]

    def test_before_all_else(self) -> None:
        """All connections that a new mirror is worth are begun at once, and are those that are used."""
        status, said, loaded = self.mirror("--from", self.server.url)
        self.assertEqual((status, json.loads(said)["fetched"]), (0, 400))
        self.assertEqual((len(loaded), self.server.connections), (4, 4))
        for each in loaded:
            self.assertEqual(set(NOT_YET) & each, set())
        [by_then] = self.asked
        self.assertIn("pipegrid.mirror.epoll_driver", by_then)
        self.assertEqual(set(NOT_BEFORE_ASKED) & set(by_then), set())
        # Now that it is there, one is enough to look.
        status, said, loaded = self.mirror("--from", self.server.url)
        self.assertEqual((status, json.loads(said)["present"]), (0, 400))
        self.assertEqual((len(loaded), self.server.connections), (1, 5))

    def test_what_is_wrong(self) -> None:
        """Nobody is dialled for a command line with a mistake, or for a list that is not there."""
        url = ("--from", self.server.url)
        for line in ((*url, "--nonsense"), (*url, "--connections", "0"), ("--from", "ftp://x/")):
            status, _, loaded = self.mirror(*line)
            self.assertEqual((status, loaded), (2, []))
        self.list.unlink()
        status, _, loaded = self.mirror(*url)
        self.assertEqual((status, loaded, self.server.connections), (1, [], 0))

    def test_taken_up(self) -> None:
        """What was begun is taken first; more are begun if more are wanted, and the rest is let go of."""
        there = mirror_urls.parse_url(self.server.url)
        other = "http://nobody.invalid/"
        start = EarlySockets([there.url, other, there.url], 2)
        with closing(SocketCache([there], 3, start)) as ahead:
            taken = [ahead.take(there) for _ in range(4)]
            self.assertEqual([each is None for each in taken], [False, False, False, True])
            for each in taken[:3]:
                assert each is not None
                each[0].close()
        self.assertEqual(start.take(there.url), [])
        self.assertEqual(start.take(other), [])
        start = EarlySockets([there.url], 1)
        [sock] = start._begun[there.url]
        start.close()
        self.assertEqual(sock.fileno(), -1)

    def test_how_many(self) -> None:
        """A mirror that is begun is worth all connections, if there is enough to ask for."""
        dest = str(self.dest)
        self.assertEqual(connections_for(str(self.list), dest, 4), 4)
        self.assertEqual(connections_for("nowhere", dest, 4), 0)
        os.makedirs(self.dest / ".pipegrid-mirror")
        self.assertEqual(connections_for(str(self.list), dest, 4), 1)
        self.list.write_text("")
        self.assertEqual(connections_for(str(self.list), self.mktemp(), 4), 1)

    def test_which_lines(self) -> None:
        """Only commands that fetch have mirrors to dial."""
        none: dict[str, str] = {}
        with patch.dict(os.environ, none, clear=True):
            for line, count in (
                (("mirror", "verify", "DEST"), None),
                (("mirror", "rpm", "DEST", "--from", self.server.url), 1),
                (("mirror", "list", str(self.list), "D", "--from", self.server.url), 4),
                (
                    (
                        *("mirror", "list", str(self.list), "D", "--from", self.server.url),
                        *("--jobs", "9", "--connections", "6"),
                    ),
                    1,
                ),
            ):
                found = fast_mirror_args.read(line)
                assert found is not None
                start = fast_mirror_args.dial(found)
                made = None if start is None else len(start._begun[self.server.url])
                self.assertEqual(made, count, line)
                if start is not None:
                    start.close()
            os.environ["HTTP_PROXY"] = "http://127.0.0.1:1"  # who is asked in their place
            assert found is not None
            self.assertIsNone(fast_mirror_args.dial(found))


class PlainUrlTests(SynchronousTestCase):
    """``plain_url`` and ``address.parse_url``."""

    def test_the_same(self) -> None:
        """What a short look makes of a URL is what a long one does."""
        hosts = ("here", "HERE.Example.org", "10.0.0.1", "[::1]", "a-b", "a_b", "me@here", "", "ü")
        ports = ("", ":", ":80", ":0080", ":65535", ":65536", ":²", ":x", ":1:2", ":-1")
        paths = ("", "/", "//", "/a", "/a/", "/a//b//", "/a%20b", "/a b", "/~u/x+y_z", "/?q", "/#f")
        understood = 0
        for scheme in ("http://", "https://", "HTTP://", "ftp://", "http:", ""):
            for host in hosts:
                for port in ports:
                    for path in paths:
                        url = scheme + host + port + path
                        if plain_url(url) is not None:
                            understood += 1
                            self.assertEqual(mirror_urls.parse_url(url), self.closely(url), url)
        self.assertGreater(understood, 100)

    def closely(self, url: str) -> Any:
        """What the long look makes of it."""
        try:
            return mirror_urls._look_closely(url)
        except UsageError as error:
            return str(error)
