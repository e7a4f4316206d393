"""A private Tor network: servers that are onion services, and a client that reaches nothing but Tor."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import pipegrid
from pipegrid.core.encoding_parameters import Params
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import CONFIG_NAME, SERVERS_NAME
from pipegrid.grid.servers_yaml import servers_of
from tests.interop.tor_network import TorNetwork, is_installed
from tests.no_network import run_without_network, unshare

SERVERS = 3
START_S = 180.0


class TorTests(SynchronousTestCase):
    """``serve --tor``, and commands that can reach Tor's socket file and nothing else."""

    def setUp(self) -> None:
        self.assertTrue(is_installed(), "Tor is not installed")
        self.assertTrue(unshare(), "this system gives no network namespaces")
        self.small = ""
        self.home = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(shutil.rmtree, self.home, ignore_errors=True)
        self.environment = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(pipegrid.__file__).parent.parent),
        }
        self.network = TorNetwork(self.home / "tor")
        self.addCleanup(self.network.stop)
        self.network.start()

    def serve(self, number: int) -> str:
        """Start a server; returns what it prints: its addresses."""
        options = ("serve", "--tor", "--tor-control-port", f"127.0.0.1:{self.network.control_port}")
        process = subprocess.Popen(
            [sys.executable, "-m", "pipegrid.cli", "-q", "-d", f"server{number}", *options],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.addCleanup(process.wait, 30)
        self.addCleanup(process.terminate)
        assert process.stdout is not None
        self.addCleanup(process.stdout.close)
        return process.stdout.readline() + process.stdout.readline()

    def client(self, name: str, addresses: list[str]) -> None:
        """Make a client's directory."""
        place = self.home / name
        content = json.dumps(servers_of([(name, each) for each in addresses]))
        create_client(place, params=Params(2, 3), happy=3, files={SERVERS_NAME: content})
        path = place / CONFIG_NAME
        path.write_text(
            f"{path.read_text()}\n[node]\nreveal-IP-address = false\n[connections]\ntcp = tor\n"
            f"[tor]\nsocks.port = unix:{self.network.socks_path}\n"
        )

    def run_in(self, name: str, *arguments: str) -> tuple[int, bytes, str]:
        """Run a client's command; nothing may be sent but through Tor."""
        status, out, err, attempts = run_without_network(
            *(sys.executable, "-m", "pipegrid.cli", "-q", "-d", name, *arguments),
            cwd=self.home,
            env=self.environment,
            timeout=240,
        )
        self.assertEqual(attempts, 0, err)
        return status, out, err

    def launched(self, host: str) -> None:
        """A server and clients with ``launch = true``: each has a Tor of its own, which ends with it."""
        program = self.network.program(self.home / "launched")
        settings = f"\n[connections]\ntcp = tor\n[tor]\nlaunch = true\ntor.executable = {program}\n"
        path = self.home / "https" / CONFIG_NAME
        path.write_text(path.read_text().partition("\n[node]")[0] + settings)
        process = subprocess.Popen(
            [sys.executable, "-m", "pipegrid.cli", "-q", "-d", "https", "serve", "--tor"],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            nurl = process.stdout.readline()
            self.assertRegex(nurl, r"^pb\+tor://[^@]+@[a-z2-7]{56}\.onion:3457/")
            self.assertNotIn(host, nurl)
            both = [self.start("-d", "https", "get", self.small) for _ in range(2)]
            for each in both:
                out, err = each.communicate(timeout=240)
                self.assertEqual((each.returncode, out), (0, b"x" * 200), err)
                self.assertIn(b"Tor is starting: ", err)
            self.assertEqual(
                sorted(each.name for each in (self.home / "https/private").glob("tor-*")),
                ["tor-1", "tor-2", "tor-3"],
            )
        finally:
            process.kill()  # also then Tor ends
            process.communicate()
        until_s = time.monotonic() + 30
        while self.tors():
            self.assertLess(time.monotonic(), until_s)
            time.sleep(0.2)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "pipegrid.cli", *arguments],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def tors(self) -> list[str]:
        """Return the processes of Tor that commands have started, and that run."""
        found = []
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                text = each.read_bytes().decode("utf-8", "replace")
                found += [text] if f"{self.home}/https/private/tor-" in text else []
        return found

    def test_onion_services(self) -> None:
        """Put, get and backup, of 200 B and 10 MB, over both protocols; 0 packets outside Tor."""
        printed = [self.serve(number) for number in range(SERVERS)]
        for each in printed:
            self.assertRegex(
                each, r"^pb\+tor://[^@]+@[a-z2-7]{56}\.onion:3457/\S+#v=1\npb://[^@]+@tor:"
            )
        addresses = [each.splitlines() for each in printed]
        self.client("https", [nurl for nurl, _ in addresses])
        self.client("foolscap", [furl for _, furl in addresses])
        until_s = time.monotonic() + START_S
        while self.run_in("https", "status")[0] != 0:  # Tor publishes the services
            self.assertLess(time.monotonic(), until_s)
        (self.home / "small").write_bytes(b"x" * 200)
        (self.home / "large").write_bytes(os.urandom(10_000_000))
        (self.home / "tree").mkdir()
        (self.home / "tree/a").write_bytes(b"a" * 5000)
        for name in ("https", "foolscap"):
            for file in ("small", "large"):
                status, cap, err = self.run_in(name, "put", file)
                self.assertEqual(status, 0, err)
                self.small = cap.decode().strip() if file == "small" else self.small
                status, data, err = self.run_in(name, "get", cap.decode().strip())
                self.assertEqual((status, data == (self.home / file).read_bytes()), (0, True), err)
        status, _, err = self.run_in("https", "backup", "tree")
        self.assertEqual(status, 0, err)
        self.launched(addresses[0][0].partition("@")[2])
        names = {re.findall(r"@([a-z2-7]+)\.onion", nurl)[0] for nurl, _ in addresses}
        self.assertEqual(len(names), SERVERS)
