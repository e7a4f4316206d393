"""``pipegrid mirror`` with ``--client-cert``, ``--client-key`` and ``--ca``, from nginx servers."""

from __future__ import annotations

import os
import subprocess
from datetime import datetime, timezone
from hashlib import sha256

from misc.speedtest.mirror.authority import make_certificate

from tests.cli.test_mirror_redirects import NginxCase
from tests.mirror.archive import Archive
from tests.mirror.rpmarchive import REPOMD, RpmArchive
from tests.mirror.test_mirror_lists import link, metalink

REACTOR = ("--limit-rate", "100M")


class TlsCase(NginxCase):
    """Servers that want to see a certificate, or must not see one."""

    def setUp(self) -> None:
        super().setUp()
        self.made = make_certificate(self.place / "tls")
        self.trust = ("--ca", str(self.made.authority))
        self.shown = (
            *("--client-cert", str(self.made.certificate)),
            *("--client-key", str(self.made.key)),
        )

    def secured(self, files: dict[str, bytes] | None = None, **behaviour: str) -> str:
        """Start a server over TLS; returns its URL."""
        return f"https://{self.serve(files, self.made, **behaviour)}/"


class CertificateTests(TlsCase):
    """Whole archives from servers that ask for a certificate."""

    def test_archives(self) -> None:
        """Release files, indexes and packages, by both drivers; refused without it, and by the system's."""
        archive = Archive(self.signer, now=datetime.now(timezone.utc))
        url = self.secured(archive.files, client="SUCCESS")
        base = ("--from", url, "--suite", "sid", "--keyring", self.signer.keyring)
        for number, options in enumerate(([], REACTOR)):
            self.dest = self.place / f"debian{number}"
            given = ("debian", str(self.dest), *base, *options)
            status, report, errors = self.mirror(*given, *self.trust, *self.shown)
            self.assertEqual((status, errors, report.get("failed")), (0, "", 0))
            status, _, errors = self.mirror(*given, *self.trust)
            self.assertEqual(status, 1)
            self.assertIn("answers 403 for dists/sid/InRelease", errors)
            status, _, errors = self.mirror(*given, *self.shown)
            self.assertEqual(status, 1)
            self.assertIn("certificate", errors)
        repository = RpmArchive(self.signer)
        url = self.secured(repository.files, client="SUCCESS")
        for number, options in enumerate(([], REACTOR)):
            self.dest = self.place / f"rpm{number}"
            status, report, errors = self.mirror(
                *("rpm", str(self.dest), "--from", url, "--keyring", self.signer.keyring),
                *(*self.trust, *self.shown, *options),
            )
            self.assertEqual((status, errors, report.get("failed")), (0, "", 0))
            self.assertEqual(self.found(), set(repository.files))

    def test_one_file(self) -> None:
        """Certificate and key in one file; by two processes as well."""
        both = self.place / "both.pem"
        both.write_bytes(self.made.certificate.read_bytes() + self.made.key.read_bytes())
        both.chmod(0o600)
        files = {f"d/{number}": bytes([number]) * 9 for number in range(40)}
        url = self.secured(files, client="SUCCESS")
        listed = self.place / "list"
        listed.write_text(
            "".join(
                f"{sha256(data).hexdigest()} {len(data)} {path}\n" for path, data in files.items()
            )
        )
        for jobs in ("1", "2"):
            self.dest = self.place / jobs
            status, report, errors = self.mirror(
                *("list", str(listed), str(self.dest), "--from", url, "--jobs", jobs),
                *(*self.trust, "--client-cert", str(both)),
            )
            self.assertEqual((status, errors, report["fetched"]), (0, "", 40))

    def test_redirects(self) -> None:
        """Hosts that mirrors redirect to do not see it; the authorities count there as well."""
        archive = Archive(self.signer, now=datetime.now(timezone.utc))
        there = self.secured(archive.files, client="NONE").rstrip("/")
        url = self.secured(client="SUCCESS", redirects_to=f"{there}$request_uri")
        for number, options in enumerate(([], REACTOR)):
            self.dest = self.place / f"to{number}"
            status, report, errors = self.mirror(
                *("debian", str(self.dest), "--from", url, "--suite", "sid"),
                *("--keyring", self.signer.keyring, *self.trust, *self.shown, *options),
            )
            self.assertEqual((status, errors, report.get("failed")), (0, "", 0))

    def test_lists(self) -> None:
        """A metalink is fetched so, and its mirrors see it; who the list redirects to does not."""
        repository = RpmArchive(self.signer)
        url = self.secured(repository.files, client="SUCCESS")
        made = metalink(link(f"{url}{REPOMD}"), repository.files[REPOMD])
        hidden = self.secured({"m": made}, client="NONE").rstrip("/")
        for where in (
            self.secured({"m": made}, client="SUCCESS"),
            self.secured(client="SUCCESS", redirects_to=f"{hidden}$request_uri"),
        ):
            self.dest = self.place / where.rpartition(":")[2]
            status, report, errors = self.mirror(
                *("rpm", str(self.dest), "--metalink", f"{where}m"),
                *("--keyring", self.signer.keyring, *self.trust, *self.shown),
            )
            self.assertEqual((status, errors, report.get("failed")), (0, "", 0))


class WrongFilesTests(TlsCase):
    """What is said of files that cannot be used, before anything is asked."""

    def test_refused(self) -> None:
        """One sentence, status 2; nothing listens where the mirror would be."""
        other = make_certificate(self.place / "other")
        locked = self.place / "locked.key"
        subprocess.run(
            [
                *("openssl", "pkey", "-aes256", "-passout", "pass:secret"),
                *("-in", str(self.made.key), "-out", str(locked)),
            ],
            check=True,
        )
        empty = self.place / "empty"
        empty.write_bytes(b"")
        large = self.place / "large"
        large.write_bytes(bytes((1 << 20) + 1))
        pipe = self.place / "pipe"
        os.mkfifo(pipe)
        certificate, key = str(self.made.certificate), str(self.made.key)
        for options, said in (
            (["--ca", "/nowhere"], "--ca /nowhere cannot be read (No such file or directory)"),
            (["--ca", str(empty)], "has no certificate in PEM"),
            (["--ca", key], "has no certificate in PEM"),
            (["--ca", str(pipe)], "is not a file"),
            (["--ca", str(self.place)], "is not a file"),
            (["--ca", str(large)], "has more than 1048576 bytes"),
            (["--client-key", key], "give --client-cert FILE as well"),
            (["--client-cert", certificate], "no key"),
            (["--client-cert", str(empty), "--client-key", key], "has no certificate in PEM"),
            (["--client-cert", certificate, "--client-key", str(other.key)], "is not that of the"),
            (["--client-cert", certificate, "--client-key", str(locked)], "needs a passphrase"),
        ):
            status, _, errors = self.mirror(
                *("debian", str(self.dest), "--from", "https://127.0.0.1:1/", "--suite", "sid"),
                *("--keyring", self.signer.keyring, *options),
            )
            self.assertEqual((status, errors.count("\n")), (2, 1), errors)
            self.assertIn(said, errors)
            self.assertFalse(self.dest.exists())

    def test_open_key(self) -> None:
        """A key that others can read is named in a warning."""
        self.made.key.chmod(0o644)
        url = self.secured({"a": b"a"}, client="SUCCESS")
        listed = self.place / "list"
        listed.write_text(f"{sha256(b'a').hexdigest()} 1 a\n")
        status, _, errors = self.mirror(
            *("list", str(listed), str(self.dest), "--from", url, *self.trust, *self.shown)
        )
        self.assertEqual(status, 0)
        self.assertIn("has a key and can be read by other users; use chmod 600", errors)
