"""Lists of mirrors: what is taken of them, in which order, and what a metalink lets pass."""

from __future__ import annotations

import os
from hashlib import sha256, sha512
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.mirror.archive_file import BadEntry, MirrorError
from pipegrid.mirror.mirror_lists import (
    MAX_LINES,
    MAX_LIST_BYTES,
    MAX_SELECTED,
    expanded,
    fetched_list,
    read_metalink,
    read_mirror_list,
)


def metalink(
    urls: str, current: bytes = b"new", older: bytes = b"old", strong: bool = True
) -> bytes:
    """As MirrorManager writes it."""
    kinds = (("sha256", sha256), ("sha512", sha512)) if strong else ()

    def hashes(data: bytes) -> str:
        found = "".join(f'<hash type="{n}">{f(data).hexdigest()}</hash>' for n, f in kinds)
        return f'<verification><hash type="md5">{"0" * 32}</hash>{found}</verification>'

    return f"""<?xml version="1.0" encoding="utf-8"?>
<metalink version="3.0" xmlns="http://www.metalinker.org/" xmlns:mm0="http://fedorahosted.org/mirrormanager">
 <files><file name="repomd.xml"><mm0:timestamp>1</mm0:timestamp><size>3</size>{hashes(current)}
 <mm0:alternates><mm0:alternate><size>3</size>{hashes(older)}</mm0:alternate></mm0:alternates>
 <resources maxconnections="1">{urls}</resources></file></files></metalink>""".encode()


def link(url: str, preference: str = "100") -> str:
    """One mirror."""
    return f'<url protocol="x" preference="{preference}">{url}</url>'


class MetalinkTests(SynchronousTestCase):
    """Mirrors and hashes."""

    def test_order(self) -> None:
        """By preference, https first, of http and https alone, five at most, each once."""
        end = "/repodata/repomd.xml"
        found = read_metalink(
            metalink(
                link(f"http://low{end}", "1")
                + link(f"rsync://a{end}")
                + link(f"http://b{end}", "99")
                + link(f"https://c/x{end}", "99")
                + link(f"https://c/x{end}", "98")
                + link("http://other/file")
                + link(f"http://u:p@d{end}")
            ),
            "list",
        )
        self.assertEqual(found.urls, ["https://c/x/", "http://b/", "http://low/"])
        many = "".join(link(f"http://m{n}{end}") for n in range(50))
        self.assertEqual(len(read_metalink(metalink(many), "list").urls), MAX_SELECTED)

    def test_hashes(self) -> None:
        """The newest and the alternates, by all strong hashes."""
        found = read_metalink(metalink(link("http://a/repodata/repomd.xml")), "list")
        self.assertTrue(found.names(b"new"))
        self.assertTrue(found.names(b"old"))
        self.assertFalse(found.names(b"evil"))

    def test_refused(self) -> None:
        """No strong hash, no mirror, no XML, entities."""
        end = link("http://a/repodata/repomd.xml")
        for data, why in (
            (metalink(end, strong=False), "SHA-256"),
            (metalink(""), "names no mirror"),
            (b"<html>", ""),
            (b"", ""),
            (b'<!DOCTYPE x [<!ENTITY a "aaaa">]><x>&a;</x>', ""),
        ):
            with self.assertRaises(BadEntry) as caught:
                read_metalink(data, "list")
            self.assertIn(why, str(caught.exception))


class ListTests(SynchronousTestCase):
    """Lines."""

    def test_order(self) -> None:
        """By priority, the lowest first; then https; comments and other schemes are left out."""
        data = (
            b"# comment\n\nhttp://last\r\n"
            b"https://third/x/\tarch:amd64\nhttp://second\tpriority:2 arch:amd64\n"
            b"file:/srv\nhttp://first/\tpriority:1\nnonsense\nhttp://u:p@x/\n"
        )
        self.assertEqual(
            read_mirror_list(data, "list"),
            ["http://first/", "http://second/", "https://third/x/", "http://last/"],
        )

    def test_refused(self) -> None:
        """Nothing in it, or too much."""
        for data in (b"", b"<html>no</html>\n", b"\n" * (MAX_LINES + 1), b"\xff\xfe\x00"):
            self.assertRaises(BadEntry, read_mirror_list, data, "list")

    def test_files(self) -> None:
        """As apt calls them; one that is not there, or too long, is named."""
        path = Path(self.mktemp()).absolute()
        path.write_text("http://a/debian\n")
        self.assertEqual(expanded(f"mirror+file:{path}"), ["http://a/debian/"])
        self.assertEqual(expanded(f"mirror+file://{path}"), ["http://a/debian/"])
        self.assertEqual(expanded("http://a/x"), ["http://a/x"])
        self.assertRaises(MirrorError, expanded, f"mirror+file:{path}x")
        path.write_bytes(b"\n" * (MAX_LIST_BYTES + 1))
        self.assertRaises(MirrorError, expanded, f"mirror+file:{path}")

    def test_fetching(self) -> None:
        """No other schemes, and who is not there is named without a password."""
        self.assertRaises(UsageError, fetched_list, "file:///etc/passwd")
        for wrong in ("http://abc.onion/list", "http://[/list"):
            self.assertRaises(UsageError, fetched_list, wrong)
        with patch.dict(os.environ, {"ALL_PROXY": "socks5h://127.0.0.1:1"}):
            self.assertRaises(UsageError, fetched_list, "http://127.0.0.1:1/list")
        with self.assertRaises(MirrorError) as caught:
            fetched_list("http://joe:secret@127.0.0.1:1/list?token")
        self.assertNotIn("secret", str(caught.exception))
        self.assertNotIn("token", str(caught.exception))

    def test_the_proxy_of_all(self) -> None:
        """``ALL_PROXY`` counts for lists as for mirrors; a redirect leads to no host that only Tor knows."""
        asked: list[tuple[str, str | None]] = []

        class ListProxy(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append((self.path, self.headers["Proxy-Authorization"]))
                self.send_response(302 if "away" in self.path else 200)
                self.send_header("Location", "http://abc.onion/list")
                self.end_headers()
                self.wfile.write(b"http://a/\n")

            def do_CONNECT(self) -> None:
                asked.append((self.path, self.headers["Proxy-Authorization"]))
                self.send_error(403)

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), ListProxy)
        self.addCleanup(server.server_close)
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(server.shutdown)
        here = f"127.0.0.1:{server.server_port}"
        environment = {"ALL_PROXY": f"http://joe:pass@{here}", "no_proxy": "127.0.0.1"}
        with patch.dict(os.environ, environment):
            self.assertEqual(fetched_list("http://mirrors.invalid/list"), b"http://a/\n")
            self.assertRaises(MirrorError, fetched_list, "https://mirrors.invalid/list")
            self.assertEqual(fetched_list(f"http://{here}/list"), b"http://a/\n")
            with self.assertRaises(UsageError) as caught:
                fetched_list(f"http://{here}/away")
        self.assertIn("only Tor or I2P know its host", str(caught.exception))
        login = "Basic am9lOnBhc3M="
        self.assertEqual(
            asked,
            [
                ("http://mirrors.invalid/list", login),
                ("mirrors.invalid:443", login),
                ("/list", None),
                ("/away", None),
            ],
        )
