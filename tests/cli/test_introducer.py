"""``pipegrid introducer``: directories, settings that are refused, and servers and clients that use it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path

from misc.speedtest.peers.nodes import free_port
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from pipegrid.cli.command_grammar import start
from pipegrid.cli.console import Console
from pipegrid.disk.directory_claim import process_began
from pipegrid.grid.servers_and_introducers_yaml import load_introducers
from pipegrid.server import identity
from tests.cli.processes import ProcessTestCase, in_fresh_processes
from tests.cli.test_invite import LINE_S, line_of

LOOPBACK = "tcp:0:interface=127.0.0.1"
REVEALS = "[node]\nreveal-IP-address = false\n"


class DirectoryTests(TestCase):
    """The command, on the real reactor."""

    timeout = 60

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.out, self.err = io.BytesIO(), io.StringIO()

    def introducer(self, *arguments: str) -> Deferred[int]:
        """Start the command."""
        self.out, self.err = io.BytesIO(), io.StringIO()
        console = Console(None, self.out, self.err)
        directory = str(self.directory)
        return start(["-d", directory, "--json", "introducer", *arguments], console, reactor)

    async def furl_of(self, running: Deferred[int]) -> str:
        """Wait for the fURL, then stop the introducer."""
        while not self.out.getvalue():
            await deferLater(reactor, 0.005)
            self.assertFalse(running.called, self.err.getvalue())
        running.cancel()
        self.assertEqual(await running, 0)
        furl: str = json.loads(self.out.getvalue())["furl"]
        return furl

    def test_a_new_directory(self) -> Deferred[None]:
        """It keeps port and location, in a form that Tahoe-LAFS runs; no secret is in the log."""
        return Deferred.fromCoroutine(self._new())

    async def _new(self) -> None:
        options = "--port", LOOPBACK, "--location", "example.org:80", "--metrics", "0"
        furl = await self.furl_of(self.introducer(*options))
        written = (self.directory / "tahoe.cfg").read_text()
        self.assertRegex(
            written,
            r"\[node\]\nweb.port = tcp:0:interface=127.0.0.1\n"
            r"tub.port = tcp:[1-9][0-9]*:interface=127.0.0.1\ntub.location = tcp:example.org:80\n",
        )
        self.assertTrue((self.directory / "tahoe-introducer.tac").exists())
        again = await self.furl_of(self.introducer())
        self.assertEqual(again, furl)
        self.assertIn("@tcp:example.org:80/", furl)
        self.assertEqual((self.directory / "private/introducer.furl").read_text().strip(), furl)
        self.assertEqual((self.directory / "tahoe.cfg").read_text(), written)
        self.assertNotIn(furl.rpartition("/")[2], self.err.getvalue())

    def test_a_directory_of_tahoe(self) -> Deferred[None]:
        """The fURL stays the same, whatever its last part; nothing that Tahoe-LAFS reads is changed."""
        return Deferred.fromCoroutine(self._tahoe())

    async def _tahoe(self) -> None:
        pem = identity.make_pem()
        known = identity.from_pem(pem, "introducer", "node.pem").furl(["tcp:10.0.0.7:80"])
        (self.directory / "private").mkdir(parents=True)
        (self.directory / "private/node.pem").write_bytes(pem)
        (self.directory / "introducer.furl").write_text(f"{known}\n")  # where it was before 1.10
        (self.directory / "tahoe.cfg").write_text(
            f"[node]\ntub.port = {LOOPBACK},{LOOPBACK}\ntub.location = AUTO\n"
            "reveal-IP-address = true\nnickname = n\n"
        )
        running = self.directory / "running.process"
        running.write_text(f"{os.getpid()} {process_began(os.getpid())}")
        # A node of this very process id is this process; the next is another's.
        running.write_text(f"{os.getppid()} {process_began(os.getppid())}")
        self.assertEqual(await self.introducer(), 2)
        self.assertIn("still running", self.err.getvalue())
        running.unlink()
        before = {path: path.read_bytes() for path in self.directory.rglob("*") if path.is_file()}
        # AUTO: what Tahoe-LAFS has found out is in the fURL, which has moved to ``private`` by now.
        self.assertEqual(await self.furl_of(self.introducer()), str(known))
        after = {path: path.read_bytes() for path in self.directory.rglob("*") if path.is_file()}
        added = {
            self.directory / "private/introducer.lock": b"",
            self.directory / "private/introducer-announcements.json": (
                b'{"format": 1, "announcements": [\n\n]}\n'
            ),
        }
        self.assertEqual(after, before | added)

    def test_refusals(self) -> Deferred[None]:
        """What cannot be followed is a sentence that names it, and status 2; the directory is as before."""
        return Deferred.fromCoroutine(self._refusals())

    async def _refusals(self) -> None:
        self.directory.mkdir()
        for name, text, said in (
            ("tahoe.cfg", REVEALS, "reveals the IP address"),
            ("tahoe.cfg", "[connections]\ntcp = disabled\n", "[connections] tcp is 'disabled'"),
            ("tahoe.cfg", "[connections]\ntcp = tor\n", "[connections] tcp is 'tor'"),
            ("tahoe.cfg", "[tor]\nonion = true\n", "starts no onion service"),
            ("tahoe.cfg", "[node]\ntub.port = disabled\n", "tub.port is 'disabled'"),
            ("tahoe.cfg", "[node]\ntub.port = listen:i2p\n", "no onion or I2P service"),
            ("tahoe.cfg", "[node]\ntub.location = disabled\n", "tub.location is 'disabled'"),
            ("tahoe.cfg", "[node]\ntub.prot = tcp:1\n", "tub.port"),
            ("tahoe.cfg", "[client]\nshares.needed = 3\n", "has no section [client]"),
            ("tahoe.cfg", "[node]\ntub.port = tcp:0\ntub.location = x\n", "HOST:PORT"),
            ("tahoe.cfg", "[node]\ntub.port = nonsense:1\n", "not a port or endpoint"),
            ("tahoe.cfg", "node", "tahoe.cfg"),
            ("pipegrid.cfg", "", "is a client's or a storage server's directory"),
            ("tahoe-client.tac", "", "is a client's or a storage server's directory"),
        ):
            path = self.directory / name
            path.write_text(text)
            self.assertEqual(await self.introducer(), 2, text)
            self.assertIn(said, self.err.getvalue())
            self.assertNotIn("Traceback", self.err.getvalue())
            self.assertNotIn(b"furl", self.out.getvalue())
            path.unlink()
        self.assertEqual(await self.introducer("--port", "1", "--max-connections", "3"), 2)

    def test_two_furls(self) -> Deferred[None]:
        """Which of them clients know cannot be guessed."""
        return Deferred.fromCoroutine(self._two())

    async def _two(self) -> None:
        (self.directory / "private").mkdir(parents=True)
        (self.directory / "tahoe.cfg").write_text(f"[node]\ntub.port = {LOOPBACK}\n")
        for name in ("introducer.furl", "private/introducer.furl"):
            (self.directory / name).write_text("pb://x")
        self.assertEqual(await self.introducer(), 2)
        self.assertIn("remove the one that clients do not know", self.err.getvalue())


class UsersTests(ProcessTestCase):
    """Real processes of an introducer, servers and clients."""

    def background(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command that goes on until it is told to end, or the test ends."""
        process = self.start(*arguments)
        self.addCleanup(self.end, process)
        return process

    def end(self, process: subprocess.Popen[str]) -> str:
        """End a process; returns what it said."""
        if process.poll() is None:
            process.terminate()
        if process.stderr is None or process.stderr.closed:
            return ""
        return process.communicate(timeout=LINE_S)[1]

    def introducer(self, *options: str) -> tuple[subprocess.Popen[str], str]:
        """Start the introducer; returns it and its fURL."""
        process = self.background("-d", "i", "introducer", *options)
        return process, line_of(process.stdout)

    def serve(self, who: str, *options: str) -> subprocess.Popen[str]:
        """Start a server, and wait until it serves."""
        process = self.background("-d", who, "serve", "--port", LOOPBACK, *options)
        self.assertRegex(line_of(process.stdout), "^pb://")
        return process

    def servers(self, who: str, count: int, status: int = 0) -> None:
        """A client finds so many servers, whether they run or not."""
        out, _ = self.run_command("-d", who, "--json", "status", status=status)
        lines = [json.loads(line) for line in out.splitlines()]
        self.assertEqual(sum("protocol" in each for each in lines), count)

    def listed(self, status_port: str) -> int:
        """Return how many storage servers the introducer lists."""
        with urllib.request.urlopen(f"http://127.0.0.1:{status_port}/?t=json") as page:
            number: int = json.load(page)["announcement_summary"].get("storage", 0)
            return number

    @in_fresh_processes
    def test_a_grid(self) -> None:
        """Servers are found; a killed introducer stops nobody, and a new one lists what the last one did."""
        status_port = str(free_port())
        introducer, furl = self.introducer("--port", LOOPBACK, "--metrics", status_port)
        servers = [self.serve(name, "--introducer", furl) for name in ("a", "b")]
        init = "init", "--introducer", furl, "-k", "1", "-n", "2", "--happy", "2"
        self.run_command("-d", "c", *init)
        (self.home / "file").write_bytes(os.urandom(10_000))
        cap, _ = self.run_command("-d", "c", "put", "file")
        self.assertEqual(self.listed(status_port), 2)
        introducer.kill()
        introducer.wait(LINE_S)
        _, said = self.run_command("-d", "c", "get", cap, "-o", "copy")
        self.assertEqual((self.home / "copy").read_bytes(), (self.home / "file").read_bytes())
        introducer, again = self.introducer("--metrics", status_port)
        self.assertEqual(again, furl)
        self.serve("e", "--introducer", furl)
        self.servers("c", 3)
        until_s = time.monotonic() + LINE_S
        while (
            self.listed(status_port) < 3
        ):  # what the killed one had not written is announced again
            self.assertLess(time.monotonic(), until_s)
            time.sleep(0.1)
        said = self.end(introducer)
        self.assertIn("stopped the introducer of i", said)
        for server in servers:  # what they announced has outlived them
            self.end(server)
        introducer, _ = self.introducer()
        self.run_command("-d", "d", *init)
        self.servers("d", 3, status=3)

    @in_fresh_processes
    def test_an_invitation(self) -> None:
        """A client with an introducer invites a server, which announces itself to it, and a client."""
        _, furl = self.introducer("--port", LOOPBACK)
        self.serve("a", "--introducer", furl)
        self.run_command(
            "-d", "c", "init", "--introducer", furl, "-k", "1", "-n", "2", "--happy", "1"
        )
        relay_port = free_port()
        relay = "--relay-url", f"ws://127.0.0.1:{relay_port}/v1"
        listen = "--listen", f"127.0.0.1:{relay_port}"
        inviting = self.background("-d", "c", "invite", *listen)
        self.serve("b", "--join", line_of(inviting.stdout), *relay)
        self.assertEqual(inviting.wait(LINE_S), 0)
        self.servers("c", 2)
        inviting = self.background("-d", "c", "invite", *listen)
        self.run_command("-d", "d", "join", line_of(inviting.stdout), *relay)
        (known,) = load_introducers(self.home / "d").addresses
        self.assertEqual(str(known.furl), furl)
        self.servers("d", 2)
