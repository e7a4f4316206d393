"""What the web API says to requests that make no sense: one clear sentence each."""

from __future__ import annotations

import subprocess
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from twisted.trial.unittest import SynchronousTestCase

from tests.gateway.test_webapi_vectors import gateway

CHK = f"URI:CHK:{'a' * 26}:{'b' * 51}a:3:10:1000"


class BadRequestTests(SynchronousTestCase):
    """Asked over a real connection."""

    def ask(self, method: str, path: str, body: bytes = b"", kind: str = "") -> tuple[int, str]:
        """Send one request; returns the status and what is said."""
        address = urlsplit((gateway() / "node.url").read_text().strip()).netloc
        connection = HTTPConnection(address, timeout=60)
        try:
            connection.request(method, path, body, {"Content-Type": kind} if kind else {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def refused(self, status: int, words: str, method: str, path: str, body: bytes = b"") -> None:
        """Check that a request is refused by a sentence with these words."""
        found, said = self.ask(method, path, body)
        self.assertEqual(found, status, said)
        self.assertIn(words, said)
        self.assertNotIn("\n", said)
        self.assertNotIn("unexpected", said)

    def test_curl_waits(self) -> None:
        """curl asks before it sends a large body: it gets "100 Continue", or the error at once."""
        path = Path(self.mktemp())
        path.write_bytes(bytes(range(256)) * 8192)
        url = (gateway() / "node.url").read_text().strip()
        _, root = self.ask("POST", "/uri?t=mkdir")
        shown = ["-w", "\n%{http_code} %{size_upload}"]
        for target, status, sent, words in (
            ("uri", 200, path.stat().st_size, "URI:CHK:"),
            (f"uri/{root}/name?t=uri", 413, 0, "the body has 2097152 bytes, and at most 65536"),
        ):
            command = ["curl", "-sv", *shown, "-T", str(path), f"{url}{target}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
            self.assertIn("> Expect: 100-continue", done.stderr)
            self.assertEqual("< HTTP/1.1 100 Continue" in done.stderr, sent > 0)
            said, numbers = done.stdout.rsplit("\n", 1)
            self.assertEqual(numbers, f"{status} {sent}")
            self.assertIn(words, said)
            self.assertNotIn("\n", said)

    def test_invalid_caps(self) -> None:
        """They are named by their beginning alone, wherever they are given."""
        for text, shown in (
            ("nonsense", "'nonsense' is not a capability"),
            (f"{CHK}x", "'URI:CHK:aaaa...' is not a capability"),
            ("URI:DIR2:aaaa:bbbb", "'URI:DIR2:aaa...' is not a capability"),
        ):
            self.refused(400, shown, "GET", f"/uri/{text}")
            self.refused(400, shown, "GET", f"/uri/{text}/name")
            self.refused(400, shown, "PUT", f"/uri/{text}")
            self.refused(409, shown, "PUT", f"/uri/{text}/name")

    def test_paths_and_names(self) -> None:
        """Through a file; of no characters; not UTF-8; with a slash in a form."""
        _, root = self.ask("POST", "/uri?t=mkdir")
        self.assertEqual(self.ask("PUT", f"/uri/{root}/file", b"x")[0], 201)
        self.refused(400, "'file' is not a directory", "GET", f"/uri/{root}/file/x")
        self.refused(409, "'file' is not a directory", "PUT", f"/uri/{root}/file/x", b"x")
        self.refused(400, "empty", "PUT", f"/uri/{root}//x", b"x")
        self.refused(400, "is not UTF-8", "PUT", f"/uri/{root}/%FF", b"x")
        self.refused(400, "has no slash", "POST", f"/uri/{root}?t=mkdir&name=a/b")
        self.refused(404, "No such child: none", "DELETE", f"/uri/{root}/none")
        self.refused(400, "at most 32768 are allowed", "PUT", f"/uri/{root}/{'n' * 40_000}", b"x")

    def test_a_name_beyond_any_head(self) -> None:
        """It is refused by the length of the head, and the client can read that."""
        path = "n" * 90_000
        url = (gateway() / "node.url").read_text().strip()
        command = ["curl", "-s", "-w", "%{http_code}", "-T", "/dev/null", f"{url}uri/{path}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        self.assertTrue(done.stdout.startswith("the head of the request has more"), done.stdout)
        self.assertTrue(done.stdout.endswith("or leave out headers\n431"), done.stdout)

    def test_arguments_and_bodies(self) -> None:
        """The value is named, and what would be right."""
        _, root = self.ask("POST", "/uri?t=mkdir")
        self.refused(400, "Unknown format: 'tar'; it is", "PUT", "/uri?format=tar", b"x")
        self.refused(400, "the argument mutable must be", "PUT", "/uri?mutable=maybe", b"x")
        self.refused(400, "is not JSON", "POST", f"/uri/{root}?t=set_children", b"{")
        self.refused(400, "is missing", "POST", f"/uri/{root}?t=uri&name=x")
        form = "multipart/form-data; boundary=b"
        body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc'
        status, said = self.ask("POST", "/uri?t=upload", body, form)
        self.assertEqual((status, said.split(":")[0]), (400, "the form cannot be understood"))
