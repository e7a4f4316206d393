"""Credentials: for whom they are."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.mirror.credentials import MAX_FILE_BYTES, Credentials, read_credentials, user_of
from pipegrid.mirror.mirror_urls import HostAccess, own_route
from pipegrid.mirror.redirects import RedirectTable


def basic(text: str) -> bytes:
    """The header line of a user and password."""
    return b"Authorization: Basic %s\r\n" % b64encode(text.encode())


class CredentialsTests(SynchronousTestCase):
    """Files, and what is made of them."""

    def setUp(self) -> None:
        self.place = Path(self.mktemp())
        (self.place / "apt/auth.conf.d").mkdir(parents=True)

    def write(self, name: str, text: str, mode: int = 0o600) -> None:
        path = self.place / name
        path.write_text(text)
        path.chmod(mode)

    def read(self) -> Credentials:
        return read_credentials({"HOME": str(self.place)}, str(self.place / "apt"))

    def test_netrc(self) -> None:
        """By host, over lines, with comments, macros, quotes and a default; for http and https."""
        self.write(
            ".netrc",
            "# machine no login a password b\nmachine a.example\n\tlogin joe\n\tpassword s#c\n"
            "macdef init\nmachine b.example login evil password x\n\n"
            'machine c.example login "j" password "p"\n'
            "machine d.example:81 login d password e\ndefault login any password one\nmachine e.example",
        )
        found = self.read()
        for url, expected in (
            ("http://a.example/x", "joe:s#c"),
            ("https://A.example:444/x", "joe:s#c"),
            ("http://b.example/", "any:one"),
            ("http://c.example/", "j:p"),
            ("http://d.example:81/", "d:e"),
            ("http://d.example/", "any:one"),
            ("http://a.example.evil/", "any:one"),
        ):
            self.assertEqual(found.header_for(url), basic(expected), url)
        self.assertEqual(found.warnings, [])
        self.assertNotIn("joe", repr(found))

    def test_apt(self) -> None:
        """Without a scheme for https alone; with port and path for these alone; the first that fits."""
        self.write("apt/auth.conf", "machine a.example/deb login one password p\n")
        self.write(
            "apt/auth.conf.d/b.conf",
            "machine a.example login two password p machine http://c.example login c password p\n"
            "machine d.example:8443/x/ login d password p\n",
        )
        self.write("apt/auth.conf.d/ignored", "machine e.example login e password p")
        self.write(".netrc", "machine a.example login three password p")
        found = self.read()
        for url, expected in (
            ("https://a.example/deb/dists", "one:p"),
            ("https://a.example/deb", "one:p"),
            ("https://a.example/debian/", "two:p"),
            ("http://a.example/deb/", "three:p"),
            ("http://c.example/", "c:p"),
            ("https://d.example:8443/x/y", "d:p"),
        ):
            self.assertEqual(found.header_for(url), basic(expected), url)
        for url in ("https://c.example/", "https://d.example/x/", "https://e.example/"):
            self.assertEqual(found.header_for(url), b"", url)

    def test_warnings(self) -> None:
        """Files that others can read, that are too long, that are no files; never what is in them."""
        self.write(".netrc", "machine a login b password s3cret", 0o644)
        self.write("apt/auth.conf", "machine a login b password s3cret", 0o604)
        self.write("apt/auth.conf.d/a.conf", "x" * (MAX_FILE_BYTES + 1))
        self.write("apt/auth.conf.d/b.conf", "machine a login b password s3cret", 0o640)
        found = self.read()
        self.assertEqual(len(found.warnings), 3)
        self.assertNotIn("s3cret", " ".join(found.warnings))
        (self.place / ".netrc").unlink()
        (self.place / ".netrc").mkdir()
        self.assertIn("cannot be read", " ".join(self.read().warnings))

    def test_nothing_there(self) -> None:
        """No files, no warnings."""
        found = read_credentials({}, str(self.place / "nowhere"))
        self.assertEqual((found.warnings, found.header_for("https://a/")), ([], b""))

    def test_users_in_urls(self) -> None:
        """They leave the URL; errors do not show them."""
        for url, expected in (
            ("http://joe:p%40ss@a:81/x", ("http://a:81/x", basic("joe:p@ss"))),
            ("http://joe@a", ("http://a", basic("joe:"))),
            ("http://a/x@y", ("http://a/x@y", b"")),
        ):
            self.assertEqual(user_of(url), expected)
        address = HostAccess({}).address("https://joe:s3cret@a.example/debian")
        self.assertEqual(
            (address.url, address.headers), ("https://a.example/debian", basic("joe:s3cret"))
        )
        self.assertNotIn("joe", repr(address))
        for url in ("http://joe:s3cret@a/?q", "ftp://joe:s3cret@a/", "http://joe:s3cret@/"):
            with self.assertRaises(UsageError) as caught:
                HostAccess({}).address(url)
            self.assertNotIn("s3cret", str(caught.exception))

    def test_redirects(self) -> None:
        """Another host gets its own, or none; never those of the first."""
        self.write(".netrc", "machine b.example login b password p")
        access = HostAccess({}, self.read().header_for)
        mirror = access.address("http://joe:s3cret@a.example/")
        table = RedirectTable(access)
        for host, expected in (("b.example", basic("b:p")), ("c.example", b"")):
            route = table.follow(own_route(mirror, "x"), [f"http://{host}/y".encode()])
            self.assertEqual(route.address.headers, expected)
