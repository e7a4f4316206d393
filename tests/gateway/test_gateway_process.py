"""``pipegrid gateway`` as a process: what it writes, what it answers, how it ends."""

from __future__ import annotations

import subprocess
import time
from http.client import HTTPConnection

from tests.cli.processes import TIMEOUT_S, ProcessTestCase


class GatewayProcessTests(ProcessTestCase):
    """One gateway on an embedded grid."""

    def start_gateway(self) -> subprocess.Popen[str]:
        """Start one on a free port; returns it when it listens."""
        self.run_command("-d", "c", "init", "--local")
        process = self.start("-d", "c", "gateway", "--port", "tcp:0:interface=127.0.0.1")
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        until_s = time.monotonic() + TIMEOUT_S
        while not (self.home / "c/node.url").exists() and time.monotonic() < until_s:
            self.assertIsNone(process.poll())
            time.sleep(0.05)
        return process

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
