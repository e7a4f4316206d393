"""``pipegrid gateway`` as a process: what it writes, what it answers, how it ends, when it does not start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from typing import Any

from pipegrid.disk.directory_claim import process_began, refuse_if_running
from pipegrid.gateway.gateway_settings import load_settings
from tests.cli.processes import TIMEOUT_S, ProcessTestCase, in_fresh_processes

LOOPBACK = "tcp:0:interface=127.0.0.1"


class GatewayProcessTests(ProcessTestCase):
    """One gateway on an embedded grid."""

    def start_gateway(self) -> subprocess.Popen[str]:
        """Start one on a free port; returns it when it listens."""
        self.run_command("-d", "c", "init", "--local")
        process = self.start("-d", "c", "gateway", "--port", LOOPBACK)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        self.wait_for_url(process)
        return process

    def wait_for_url(self, process: subprocess.Popen[Any]) -> None:
        """Wait until a gateway listens."""
        until_s = time.monotonic() + TIMEOUT_S
        while not (self.home / "c/node.url").exists() and time.monotonic() < until_s:
            self.assertIsNone(process.poll())
            time.sleep(0.05)

    def request(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request; returns status, headers and body."""
        host = (self.home / "c/node.url").read_text().strip().removeprefix("http://").rstrip("/")
        connection = HTTPConnection(host, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def test_a_number_as_port(self) -> None:
        """Given as an option it is of this machine alone; in a node's settings it is as in Tahoe-LAFS."""
        self.run_command("-d", "c", "init", "--local")
        process = self.start("-d", "c", "gateway", "--port", "0")
        self.addCleanup(process.kill)
        self.wait_for_url(process)
        process.terminate()
        _, err = process.communicate(timeout=TIMEOUT_S)
        self.assertNotIn("every machine", err)
        node = self.home / "node"
        node.mkdir()
        (node / "tahoe.cfg").write_text("[node]\nweb.port = 3456\n")
        self.assertEqual(load_settings(node).port, "tcp:3456")
        self.assertEqual(load_settings(node, port="3457").port, "tcp:3457:interface=127.0.0.1")
        self.assertEqual(load_settings(node, port="tcp:3457").port, "tcp:3457")

    def test_a_gateway(self) -> None:
        """It stores a file, gives it back, keeps its secrets out of the log, and ends in good order."""
        process = self.start_gateway()
        self.assertRegex((self.home / "c/private/api_auth_token").read_text(), r"\A[\w-]{43}=\n\Z")
        self.assertEqual((self.home / "c/private/api_auth_token").stat().st_mode & 0o777, 0o600)
        data = b"x" * 300_000
        status, _, cap = self.request("PUT", "/uri", data)
        self.assertEqual(status, 200)
        self.assertTrue(cap.startswith(b"URI:CHK:"), cap)
        status, headers, found = self.request("GET", f"/uri/{cap.decode()}")
        self.assertEqual((status, headers["Content-Length"], found), (200, "300000", data))
        status, _, found = self.request("GET", "/restic/r/config")
        self.assertEqual(status, 403)
        self.assertIn(b"c/private/.htpasswd", found)
        _, err = self.run_command("-d", "c", "gateway", status=2)
        self.assertIn("another gateway runs in", err)
        process.terminate()
        out, err = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual(process.returncode, 0, err)
        self.assertEqual(out, (self.home / "c/node.url").read_text())
        self.assertNotIn("URI:", err)
        self.assertIn("GET /uri/[CENSORED] 200 300000 B", err)
        self.assertFalse((self.home / "c/running.process").exists())
        self.assertEqual(list((self.home / "c/tmp").iterdir()), [])

    def test_it_does_not_start(self) -> None:
        """One sentence each: a port that is taken or makes no sense, no directory, a node that runs."""
        self.run_command("-d", "c", "init", "--local")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = f"tcp:{taken.getsockname()[1]}:interface=127.0.0.1"
            _, err = self.run_command("-d", "c", "gateway", "--port", port, status=2)
        self.assertIn("cannot listen at", err)
        self.assertIn("Address already in use", err)
        for port, said in (
            ("nonsense:x", "is not an endpoint"),
            ("ssl:1", "is not an endpoint"),
            (
                "99999",
                "cannot listen at tcp:99999:interface=127.0.0.1: bind(): port must be 0-65535; choose",
            ),
            ("unix:/nothing/there", "cannot listen at unix:/nothing/there"),
        ):
            _, err = self.run_command("-d", "c", "gateway", "--port", port, status=2)
            self.assertIn(said, err)
            self.assertEqual(err.count("\n"), 1, err)
        _, err = self.run_command("-d", "nothing", "gateway", status=2)
        self.assertIn("nothing", err)
        began_s = process_began(os.getpid())
        (self.home / "c/running.process").write_text(f"{os.getpid()} {began_s}\n")
        _, err = self.run_command("-d", "c", "gateway", status=2)
        self.assertIn("the node of c is still running", err)
        self.assertFalse((self.home / "c/node.url").exists())

    @in_fresh_processes
    def test_a_library_is_missing(self) -> None:
        """It is named, with what installs it."""
        self.run_command("-d", "c", "init", "--local")
        hidden = self.home / "hidden"
        hidden.mkdir()
        (hidden / "wsproto.py").write_text("raise ModuleNotFoundError(name='wsproto')\n")
        self.environment["PYTHONPATH"] = f"{hidden}:{self.environment['PYTHONPATH']}"
        _, err = self.run_command("-d", "c", "gateway", status=2)
        self.assertIn("the gateway needs the module wsproto", err)
        self.assertIn("pip install 'pipegrid[gateway]'", err)

    def test_a_service_of_twist(self) -> None:
        """``twist pipegrid-gateway`` does the same, and a storage server may run on the directory."""
        self.run_command("-d", "c", "init", "--local")
        command = [sys.executable, "-m", "twisted", "pipegrid-gateway"]
        with (self.home / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *command,
                    "--directory",
                    "c",
                    "--port",
                    LOOPBACK,
                    "--host",
                    "files.example",
                    "--no-auth",
                ],
                cwd=self.home,
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.wait_for_url(process)
        self.assertEqual(self.request("GET", "/uri/URI:LIT:nbswy3dp")[2], b"hello")
        self.assertEqual(self.request("GET", "/restic/r/config")[0], 404)
        refuse_if_running(self.home / "c")
        process.terminate()
        # ``twist`` ends by the signal, once its services have ended.
        self.assertEqual(process.wait(TIMEOUT_S), -signal.SIGTERM)
        self.assertFalse((self.home / "c/running.process").exists())
