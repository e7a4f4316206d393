"""A server that runs needs no file of its program: whatever is asked of it, it has imported."""

from __future__ import annotations

import random
import re
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import attrs
from misc.attack.foolscap import Peer, call, value
from misc.attack.honest import Client
from misc.attack.target import Target, make_target, refused_or_cut
from misc.command import environment
from misc.speedtest.processes import ROOT, first_line
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.startup import lazy_modules
from tests.grid.introducer_support import FURL

ATTACKS = (
    "floods",
    "foolscap_nonsense",
    "foolscap_floods",
    "foolscap_reads",
    "foolscap_references",
    "foolscap_vectors",
    "cbor_elements",
    "leases",
    "bundles",
    "slots",
    "vectors",
    "ranges",
    "advisories",
)
"""They ask for everything that there is, rightly and wrongly."""
EACH_S = 0.5
PATIENCE_S = 60.0


class LateImportTests(SynchronousTestCase):
    """``pipegrid serve`` and ``twist pipegrid``, in processes that can import no module any more."""

    def setUp(self) -> None:
        self.scratch = Path(self.mktemp()).absolute()
        self.scratch.mkdir()
        self.record = self.scratch / "record"

    def start(self, *program: str) -> subprocess.Popen[str]:
        """Start one."""
        surroundings = environment()
        surroundings["PYTHONPATH"] += f":{ROOT}"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.late_imports", str(self.record), *program],
            env=surroundings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def ask_for_everything(self, target: Target) -> None:
        """Be an honest client, then hostile ones; the Foolscap of all comes first."""
        with Peer(target).name().socket as connection:
            connection.sendall(call(2, 1, b"get_version"))
            self.assertIn(b"maximum-immutable-share-size", connection.recv(1 << 16))
            connection.sendall(call(3, 1, b"slot_readv", value(b"x"), value([1]), value({})))
            connection.sendall(call(4, 1, b"no_such_method"))
            connection.recv(1 << 16)
        Client(target, random.Random(1)).put_and_get()
        for name in ATTACKS:
            with refused_or_cut():
                attack = import_module(f"misc.attack.{name}").attack
                attack(attrs.evolve(target, ends_s=time.monotonic() + EACH_S))
        Client(target, random.Random(2)).put_and_get()

    def assertNothingImported(self) -> None:
        """Nothing was looked for."""
        self.assertEqual(self.record.read_text() if self.record.exists() else "", "")

    def test_serve(self) -> None:
        """With all that a server can do besides; and it ends in good order."""
        directory, log = self.scratch / "node", self.scratch / "log"
        page = (self.scratch / "m").relative_to(Path.cwd())
        process = self.start(
            *("pipegrid.cli", "-q", "-d", str(directory), "serve"),
            *("--port", "tcp:0:interface=127.0.0.1", "--metrics", f"unix:{page}"),
            *("--log", str(log), "--introducer", str(FURL), "--expire-leases"),
        )
        addresses = first_line(process), first_line(process)
        self.ask_for_everything(make_target(*addresses, directory, PATIENCE_S))
        with socket.socket(socket.AF_UNIX) as prometheus:
            prometheus.connect(str(page))
            prometheus.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            self.assertIn(b" 200 OK", prometheus.recv(1 << 16))
        process.send_signal(signal.SIGHUP)  # the log is opened anew
        process.terminate()
        self.assertEqual(process.wait(PATIENCE_S), 0)
        self.assertNothingImported()

    def test_twist(self) -> None:
        """The same in Twisted's own process."""
        directory = self.scratch / "node"
        process = self.start(
            *("twisted", "--log-format", "text", "pipegrid", "-d", str(directory)),
            *("--port", "tcp:0:interface=127.0.0.1"),
        )
        assert process.stdout is not None
        line = ""
        while not (found := re.search(r"listening at (\S+) and (pb:\S+)", line)):
            line = process.stdout.readline()
            self.assertTrue(line, "it ended")
        nurl, furl = found.groups()
        target = make_target(nurl, furl, directory, PATIENCE_S)
        with Peer(target).name().socket as connection:
            connection.sendall(call(2, 1, b"get_version"))
            self.assertIn(b"maximum-immutable-share-size", connection.recv(1 << 16))
        Client(target, random.Random(1)).put_and_get()
        process.terminate()
        process.wait(PATIENCE_S)
        self.assertNothingImported()


class BringInTests(SynchronousTestCase):
    """Stand-ins."""

    def test_they_are_replaced(self) -> None:
        """What was put off is there afterwards."""
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys\n"
                "from pipegrid.cli.startup.lazy_modules import LazyModule, bring_in, install_lazy_modules\n"
                "install_lazy_modules()\n"
                "print(sum(isinstance(each, LazyModule) for each in sys.modules.values()))\n"
                "bring_in()\n"
                "print(sum(isinstance(each, LazyModule) for each in sys.modules.values()))\n",
            ],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        before, after = done.stdout.split()
        self.assertGreater(int(before), len(lazy_modules.LAZY) // 2)
        self.assertEqual((int(after), done.stderr), (0, ""))
