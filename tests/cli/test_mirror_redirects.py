"""``pipegrid mirror`` from nginx servers that redirect, as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64encode
from contextlib import ExitStack
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

from misc.mirror_world import debian, rpm
from misc.mirror_world.readers import read, served
from misc.mirror_world.signing import public_key
from misc.speedtest.mirror.authority import Certificate
from misc.speedtest.mirror.webserver import Behaviour, WebServer, nginx
from twisted.trial.unittest import SynchronousTestCase

from tests.mirror.archive import Archive, Signer
from tests.mirror.rpmarchive import REPOMD, RpmArchive
from tests.mirror.test_mirror_lists import link, metalink

SET_APT = "mirror_options.APT = %r\nmain()"


def lacks_nginx() -> str:
    """Return why tests are left out; "": they are not."""
    try:
        nginx()
    except RuntimeError as error:
        return str(error)
    return ""


class NginxCase(SynchronousTestCase):
    """Real servers, and a command in a process of its own."""

    if skip_all := lacks_nginx():
        skip = skip_all

    def setUp(self) -> None:
        self.place = Path(self.mktemp()).absolute()
        self.place.mkdir()
        self.dest = self.place / "dest"
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)
        self.signer = Signer()
        self.addCleanup(self.signer.close)
        self._count = 0

    def serve(
        self,
        files: dict[str, bytes] | None = None,
        certificate: Certificate | None = None,
        **behaviour: Any,
    ) -> str:
        """Start a server with some files, over TLS with a certificate; returns its HOST:PORT."""
        self._count += 1
        root = self.place / f"root{self._count}"
        root.mkdir()
        for path, data in (files or {}).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        server = WebServer(
            root, self.place / f"nginx{self._count}", Behaviour(**behaviour), certificate
        )
        return self.stack.enter_context(server).address

    def mirror(
        self, *arguments: str, apt: str = "", **environment: str
    ) -> tuple[int, dict[str, Any], str]:
        """
        Run the command; returns its status, what it said as JSON, and its errors.

        Args:
            apt: the directory of apt, if it is another one than that of this machine.
        """
        program = ["-m", "pipegrid"]
        if apt:
            program = ["-c", f"from pipegrid.cli import main, mirror_options\n{SET_APT % apt}"]
        done = subprocess.run(
            [sys.executable, *program, "mirror", *arguments, "--json", "-q"],
            capture_output=True,
            text=True,
            timeout=120,
            env={"PATH": "/usr/bin:/bin:/usr/sbin", "HOME": str(self.place), **environment},
        )
        lines = done.stdout.strip().splitlines()
        return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr

    def found(self) -> set[str]:
        """The paths that are there, our own things and names by hash apart."""
        return {
            str(path.relative_to(self.dest))
            for path in self.dest.rglob("*")
            if path.is_file() and not {".pipegrid-mirror", "by-hash"} & set(path.parts)
        }


class RedirectTests(NginxCase):
    """Whole archives behind a host that has none of them."""

    def redirecting(self, files: dict[str, bytes]) -> dict[str, str]:
        """Return URLs that redirect to where the files are: as a whole, and file by file."""
        there = self.serve(files, strips=".x")
        return {
            "host": f"http://{self.serve(redirects_to=f'http://{there}$request_uri')}/",
            "file": f"http://{self.serve(redirects_to=f'http://{there}$request_uri.x')}/",
        }

    def test_debian(self) -> None:
        """InRelease, indexes and packages; with a reactor as well; and a reading by apt's own rules."""
        archive = Archive(self.signer, now=datetime.now(timezone.utc))
        for kind, url in self.redirecting(archive.files).items():
            for option in ([], ["--limit-rate", "100M"]):
                self.dest = self.place / f"{kind}{len(option)}"
                status, report, errors = self.mirror(
                    *("debian", str(self.dest), "--from", url, "--suite", "sid"),
                    *("--keyring", self.signer.keyring, "--source", *option),
                )
                self.assertEqual((status, errors), (0, ""))
                self.assertEqual(report["failed"], 0)
                self.assertLess(set(archive.pool), self.found() | {""})
                self.assertIn("dists/sid/InRelease", self.found())

    def test_rpm(self) -> None:
        """repomd.xml and its signature, indexes and packages."""
        archive = RpmArchive(self.signer)
        for kind, url in self.redirecting(archive.files).items():
            for option in ([], ["--limit-rate", "100M"]):
                self.dest = self.place / f"{kind}{len(option)}"
                status, report, errors = self.mirror(
                    *("rpm", str(self.dest), "--from", url, "--keyring", self.signer.keyring),
                    *option,
                )
                self.assertEqual((status, errors, report["failed"]), (0, "", 0))
                self.assertEqual(self.found(), set(archive.files))

    def test_readers(self) -> None:
        """Archives of real programs, signed, as apt and dnf read them at their place and in the mirror."""
        for case in (
            next(each for each in debian.cases() if each.name == "debian-signed-ftparchive"),
            next(each for each in rpm.cases() if each.name == "rpm-signed"),
        ):
            root = self.place / f"{case.name}.made"
            case.make(root)
            files = {
                str(path.relative_to(root)): path.read_bytes()
                for path in root.rglob("*")
                if path.is_file()
            }
            with served(root) as url:
                theirs = read(case, url)
            self.assertEqual(len(theirs), 3)
            for kind, url in self.redirecting(files).items():
                self.dest = self.place / f"{case.name}.{kind}"
                options = ["--suite", case.suite] if case.suite else ["--gpgcheck"]
                status, _, errors = self.mirror(
                    *("debian" if case.suite else "rpm", str(self.dest), "--from", url),
                    *("--keyring", str(public_key()), *options),
                )
                self.assertEqual((status, errors), (0, ""))
                with served(self.dest) as here:
                    self.assertEqual(read(case, here), theirs)

    def test_list(self) -> None:
        """Any files, with blanks and plus signs; by several processes as well."""
        files = {f"pool/a b/f+{n}": b"%d" % n * 100 for n in range(300)}
        names = self.place / "list"
        names.write_text(
            "".join(f"{sha256(d).hexdigest()} {len(d)} {p}\n" for p, d in files.items())
        )
        for kind, url in self.redirecting(files).items():
            for option in ([], ["--jobs", "2"], ["--limit-rate", "100M"]):
                self.dest = self.place / f"{kind}{''.join(option)}"
                status, report, errors = self.mirror(
                    "list", str(names), str(self.dest), "--from", url, *option
                )
                self.assertEqual((status, errors), (0, ""))
                self.assertEqual(report["mirrors"][0]["files"], len(files))
                self.assertEqual(self.found(), set(files))

    def test_release_not_there(self) -> None:
        """What a redirect leads to does not have it: both are named, and the status is 1."""
        url = self.redirecting({})["host"]
        status, _, errors = self.mirror(
            *("debian", str(self.dest), "--from", url, "--suite", "sid", "--allow-unsigned")
        )
        self.assertEqual(status, 1)
        self.assertIn("answers 404", errors)

    def test_endless(self) -> None:
        """A host that redirects to itself ends with a sentence."""
        url = f"http://{self.serve(redirects_to='/again$request_uri')}/"
        status, _, errors = self.mirror(
            *("debian", str(self.dest), "--from", url, "--suite", "sid", "--allow-unsigned")
        )
        self.assertEqual(status, 1)
        self.assertIn("redirects more than 5 times", errors)
        self.assertEqual(errors.count("\n"), 1)


class ListsOfMirrorsTests(NginxCase):
    """Mirrors that a list names."""

    def test_metalink(self) -> None:
        """Only a mirror with a repomd.xml that the metalink names decides; also behind a redirect."""
        archive = RpmArchive(self.signer)
        good = self.serve(archive.files)
        stale = self.serve({**archive.files, REPOMD: b"<repomd/>"})
        links = link(f"http://{stale}/{REPOMD}", "100") + link(f"http://{good}/{REPOMD}", "9")
        named = self.serve({"metalink": metalink(links, archive.files[REPOMD])})
        url = f"http://{self.serve(redirects_to=f'http://{named}$request_uri')}/metalink?repo=x"
        arguments = ("rpm", str(self.dest), "--keyring", self.signer.keyring, "--metalink", url)
        status, report, errors = self.mirror(*arguments)
        self.assertEqual((status, errors, report["failed"]), (0, "", 0))
        self.assertEqual(self.found(), set(archive.files))
        other = self.serve({"metalink": metalink(links, b"another")})
        status, _, errors = self.mirror(*arguments[:-1], f"http://{other}/metalink")
        self.assertEqual(status, 1)
        self.assertIn("none of those that the metalink names", errors)

    def test_mirrorlist(self) -> None:
        """A list of dnf, and one of apt."""
        rpm = RpmArchive(self.signer)
        named = self.serve({"list": f"# mirrors\nhttp://{self.serve(rpm.files)}/\n".encode()})
        status, report, errors = self.mirror(
            *("rpm", str(self.dest), "--keyring", self.signer.keyring),
            *("--mirrorlist", f"http://{named}/list"),
        )
        self.assertEqual((status, errors, report["failed"]), (0, "", 0))
        debian = Archive(self.signer, now=datetime.now(timezone.utc))
        names = self.place / "debian.list"
        names.write_text(f"http://{self.serve(debian.files)}/\tpriority:1\n")
        self.dest = self.place / "debian"
        status, report, errors = self.mirror(
            *("debian", str(self.dest), "--suite", "sid", "--keyring", self.signer.keyring),
            *("--from", f"mirror+file:{names}"),
        )
        self.assertEqual((status, errors, report["failed"]), (0, "", 0))

    def test_not_there(self) -> None:
        """One sentence, and status 1."""
        for option in ("--metalink", "--mirrorlist"):
            status, _, errors = self.mirror(
                *("rpm", str(self.dest), "--allow-unsigned"),
                *(option, f"http://{self.serve()}/list?secret"),
            )
            self.assertEqual((status, errors.count("\n")), (1, 1), errors)
            self.assertIn("404", errors)
            self.assertNotIn("secret", errors)


class CredentialTests(NginxCase):
    """Who asks says who it is, to the mirror that it is for alone."""

    def test_sent_to_one(self) -> None:
        """From a URL, ~/.netrc and NETRC; the host that a mirror redirects to gets nothing, or its own."""
        basic = "Basic " + b64encode(b"joe:s3cret").decode()
        archive = Archive(self.signer, now=datetime.now(timezone.utc))
        there = self.serve(archive.files, authorization="", strips=".x")
        netrc = self.place / ".netrc"
        for kind, end in (("host", ""), ("file", ".x")):
            mirror = self.serve(
                authorization=basic, redirects_to=f"http://{there}$request_uri{end}"
            )
            for number, (user, entry) in enumerate(
                (
                    ("joe:s3cret@", ""),
                    ("", f"machine 127.0.0.1:{mirror.split(':')[1]} login joe password s3cret\n"),
                )
            ):
                netrc.write_text(entry)
                netrc.chmod(0o600)
                for option in ([], ["--limit-rate", "100M"]):
                    self.dest = self.place / f"{kind}{number}{len(option)}"
                    status, report, errors = self.mirror(
                        *("debian", str(self.dest), "--from", f"http://{user}{mirror}/"),
                        *("--suite", "sid", "--keyring", self.signer.keyring, *option),
                    )
                    self.assertEqual((status, errors, report["failed"]), (0, "", 0))
                    self.assertNotIn("s3cret", json.dumps(report))
                    for path in self.dest.rglob("*"):
                        if path.is_file():
                            self.assertNotIn(b"s3cret", path.read_bytes())

    def test_paths(self) -> None:
        """An entry of apt's with a path says nothing to other paths of the host, where redirects lead."""
        basic = "Basic " + b64encode(b"joe:s3cret").decode()
        archive = Archive(self.signer, now=datetime.now(timezone.utc))
        files = {
            f"{above}/{path}": data
            for path, data in archive.files.items()
            for above in ("open", "kept")
        }
        told = f'if ($http_authorization != "{basic}") {{ return 401; }}'
        apt = self.place / "apt"
        apt.mkdir()
        moved = f"{{ {told} rewrite ^/private/(.*)$ /open/$1 redirect; }}\n"
        within = f"{{ {told} rewrite ^/private/(.*)$ /kept/$1 last; }}\n"
        for kind, further in (
            ("all", f"location /private/ {moved}"),
            ("packages", f"location /private/pool/ {moved} location /private/dists/ {within}"),
        ):
            server = self.serve(
                files,
                further='location /open/ { if ($http_authorization != "") { return 403; } }\n'
                f"location /kept/ {{ internal; }}\n{further}",
            )
            (apt / "auth.conf").write_text(
                f"machine http://{server}/private login joe password s3cret\n"
            )
            (apt / "auth.conf").chmod(0o600)
            for url in (f"http://{server}/private", f"http://joe:s3cret@{server}/private"):
                for option in ([], ["--limit-rate", "100M"]):
                    self.dest = self.place / f"{kind}{len(url)}{len(option)}"
                    status, report, errors = self.mirror(
                        *("debian", str(self.dest), "--from", url, "--suite", "sid"),
                        *("--keyring", self.signer.keyring, *option),
                        apt=str(apt),
                    )
                    if "@" in url:  # a user of the URL is for the whole of its host
                        self.assertEqual(status, 1)
                        self.assertIn("403", errors)
                    else:
                        self.assertEqual((status, errors, report.get("failed")), (0, "", 0), kind)

    def test_not_shown(self) -> None:
        """What goes wrong is said without them; a file that others can read is named."""
        mirror = self.serve(authorization="Basic other")
        netrc = self.place / "mine"
        netrc.write_text("machine 127.0.0.1 login joe password s3cret")
        netrc.chmod(0o644)
        for user in ("", "joe:s3cret@"):
            status, _, errors = self.mirror(
                *("debian", str(self.dest), "--from", f"http://{user}{mirror}/", "--suite", "sid"),
                "--allow-unsigned",
                NETRC=str(netrc),
            )
            self.assertEqual(status, 1)
            self.assertIn("answers 401", errors)
            self.assertIn(f"{netrc} has passwords and can be read by other users", errors)
            self.assertNotIn("s3cret", errors)
            self.assertNotIn("joe", errors)
