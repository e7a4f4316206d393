"""What a running gateway says of itself, and the operations that it keeps, as clients ask for them."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from base64 import b64encode
from http.client import HTTPConnection
from typing import Any

from wsproto.connection import Connection, ConnectionType
from wsproto.events import TextMessage

from tests.cli.processes import TIMEOUT_S, ProcessTestCase
from tests.gateway.gateway_world import CHK_DATA


class MonitoringTests(ProcessTestCase):
    """One gateway on an embedded grid."""

    def setUp(self) -> None:
        super().setUp()
        self.run_command("-d", "c", "init", "--local")
        self.process = self.start("-d", "c", "gateway", "--port", "tcp:0:interface=127.0.0.1")
        self.addCleanup(self.process.communicate)
        self.addCleanup(self.process.kill)
        url = self.home / "c/node.url"
        until_s = time.monotonic() + TIMEOUT_S
        while not url.exists() and time.monotonic() < until_s:
            self.assertIsNone(self.process.poll())
            time.sleep(0.05)
        self.host = url.read_text().strip().removeprefix("http://").rstrip("/")

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Send one request; returns status, headers and text."""
        connection = HTTPConnection(self.host, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read().decode()
        finally:
            connection.close()

    def json(self, method: str, path: str) -> Any:
        """Send one request, and return the JSON that is answered."""
        status, _, text = self.ask(method, path)
        self.assertEqual(status, 200, text)
        return json.loads(text)

    def make_tree(self) -> tuple[str, str]:
        """Store a directory with a file; returns their caps."""
        _, _, file = self.ask("PUT", "/uri", CHK_DATA)
        directory, _ = self.run_command("-d", "c", "mkdir")
        self.run_command("-d", "c", "ln", file, f"{directory}/chk")
        return directory, file

    def test_status(self) -> None:
        """Servers, transfers, statistics and metrics, for magic-folder, ``tahoe status`` and Prometheus."""
        servers = self.json("GET", "/?t=json")["servers"]
        self.assertEqual(len(servers), 10)
        for server in servers:
            self.assertTrue(server["connection_status"].startswith("Connected"))
        self.ask("PUT", "/uri", CHK_DATA)
        said = self.json("POST", "/status?t=json")
        self.assertEqual(said["active"], [])
        [upload] = said["recent"]
        self.assertEqual((upload["type"], upload["total-size"]), ("upload", 56))
        self.assertEqual(len(upload["storage-index-string"]), 26)
        statistics = self.json("POST", "/statistics?t=json")
        self.assertEqual(statistics["counters"]["uploader.bytes_uploaded"], 56)
        self.assertGreater(statistics["stats"]["node.uptime"], 0)
        status, headers, text = self.ask("GET", "/metrics")
        self.assertEqual(status, 200)
        self.assertEqual(headers["Content-Type"], "text/plain; version=0.0.4; charset=utf-8")
        self.assertIn('pipegrid_gateway_transferred_bytes_total{kind="upload"} 56.0\n', text)
        self.assertIn('pipegrid_gateway_servers{state="connected"} 10.0\n', text)
        for path in ("/status/up-1", "/status/up-1/event_json", "/helper_status", "/storage"):
            self.assertEqual(self.ask("GET", path)[0], 200, path)
        for path, wrong in (("/status/up-9", 404), ("/?t=bogus", 400), ("/statistics?t=x", 400)):
            self.assertEqual(self.ask("GET", path)[0], wrong, path)
        self.assertEqual(self.ask("POST", "/metrics")[0], 405)

    def test_check_and_streams(self) -> None:
        directory, file = self.make_tree()
        said = self.json("POST", f"/uri/{file}?t=check&output=JSON&repair=true")
        self.assertEqual(said["pre-repair-results"]["summary"], "Healthy")
        _, headers, page = self.ask("POST", f"/uri/{directory}?t=check")
        self.assertEqual(headers["Content-Type"], "text/html")
        self.assertIn("Healthy", page)
        _, _, text = self.ask("POST", f"/uri/{directory}?t=stream-manifest")
        paths = [json.loads(line).get("path") for line in text.splitlines()]
        self.assertEqual(paths, [[], ["chk"], None])
        _, _, text = self.ask("POST", f"/uri/{directory}?t=stream-deep-check&add-lease=1")
        lines = [json.loads(line) for line in text.splitlines()]
        self.assertTrue(all(one["check-results"]["results"]["healthy"] for one in lines[:-1]))
        status, _, _ = self.ask("POST", f"/uri/{file}?t=stream-manifest")
        self.assertEqual(status, 400)
        self.assertEqual(self.ask("POST", f"/uri/{file}?t=check&verify=maybe")[0], 400)
        self.assertEqual(self.ask("POST", "/uri/URI:FUTURE:x?t=check")[0], 400)

    def test_operations(self) -> None:
        """One outlives the request that started it, and is given once more only until it is released."""
        directory, _ = self.make_tree()
        start = f"/uri/{directory}?t=start-manifest&ophandle="
        self.assertEqual(self.ask("POST", start)[0], 400)
        status, headers, _ = self.ask("POST", f"{start}a%20handle&output=json")
        self.assertEqual((status, headers["Location"]), (302, "/operations/a%20handle?output=json"))
        where = headers["Location"]
        while not (said := self.json("GET", where))["finished"]:
            time.sleep(0.05)
        self.assertEqual(len(said["manifest"]), 2)
        self.assertEqual(self.ask("GET", "/operations/a%20handle?output=bogus")[0], 400)
        self.assertEqual(self.ask("GET", "/operations/a%20handle?retain-for=x")[0], 400)
        self.assertEqual(self.ask("GET", "/operations/a%20handle?t=cancel")[0], 400)
        _, _, text = self.ask("GET", "/operations/a%20handle?output=text")
        self.assertTrue(text.startswith(f"finished: yes\n {directory}\nchk URI:CHK:"), text)
        self.assertIn("<html", self.ask("GET", "/operations/a%20handle")[2])
        self.json("GET", f"{where}&release-after-complete=true")
        self.assertEqual(self.ask("GET", where)[0], 404)
        self.ask("POST", f"/uri/{directory}?t=start-deep-check&ophandle=other")
        while not (said := self.json("GET", "/operations/other?output=json"))["finished"]:
            time.sleep(0.05)
        index = said["root-storage-index"]
        part = self.json("GET", f"/operations/other/{index}?output=json")
        self.assertEqual(part["summary"], "Healthy")
        self.assertEqual(self.ask("GET", "/operations/other/unknown")[0], 404)
        self.assertEqual(self.ask("POST", "/operations/other?t=cancel")[0], 200)
        self.assertEqual(self.ask("GET", "/operations/other")[0], 404)

    def test_guesses(self) -> None:
        """Who asks for many handles that do not exist is not answered for a while."""
        statuses = [self.ask("GET", f"/operations/{number}")[0] for number in range(70)]
        self.assertEqual((statuses[0], statuses[-1]), (404, 429))

    def test_log_socket(self) -> None:
        """The log, one JSON object a message, for those who have the token; others are refused."""
        path = "/private/logs/v1"
        for given in ("", "tahoe-lafs wrong"):
            status, found, _ = self.ask("GET", path, Authorization=given)
            self.assertEqual(status, 401)
            self.assertEqual(found["WWW-Authenticate"], 'tahoe-lafs realm="tahoe-lafs"')
        token = (self.home / "c/private/api_auth_token").read_text().strip()
        host, _, port = self.host.partition(":")
        with socket.create_connection((host, int(port)), TIMEOUT_S) as client:
            key = b64encode(os.urandom(16)).decode()
            client.sendall(
                f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\nUpgrade: websocket\r\n"
                f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
                f"Authorization: tahoe-lafs {token}\r\n\r\n".encode()
            )
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1)
            self.assertTrue(head.startswith(b"HTTP/1.1 101 "), head)
            _, _, cap = self.ask("PUT", "/uri", CHK_DATA)
            self.ask("GET", f"/uri/{cap}")
            self.ask("GET", "/statistics?t=json")
            messages = self.read_until(client, "/statistics")
        self.assertIn("/uri/[CENSORED]", messages)
        self.assertNotIn("URI:CHK", messages)
        self.process.send_signal(signal.SIGTERM)
        self.assertEqual(self.process.wait(TIMEOUT_S), 0)

    def read_until(self, client: socket.socket, wanted: str) -> str:
        """Return the messages until one has this text."""
        connection, said = Connection(ConnectionType.CLIENT), ""
        while wanted not in said:
            connection.receive_data(client.recv(65536))
            for event in connection.events():
                assert isinstance(event, TextMessage)
                said += json.loads(event.data)["message"] + "\n"
        return said

    def test_open_log_sockets_do_not_delay_the_end(self) -> None:
        """Nor does an operation that runs."""
        directory, _ = self.make_tree()
        self.ask("POST", f"/uri/{directory}?t=start-deep-check&verify=true&ophandle=x")
        began_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.assertEqual(self.process.wait(TIMEOUT_S), 0)
        self.assertLess(time.monotonic() - began_s, 15)
