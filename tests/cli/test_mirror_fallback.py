"""``pipegrid mirror`` where a server refuses files that an archive can do without, with each status."""

from __future__ import annotations

from datetime import datetime, timezone

from tests.cli.test_mirror_redirects import NginxCase
from tests.mirror.archive import SUITE, Archive, check_readers
from tests.mirror.rpmarchive import REPOMD, RpmArchive

STATUSES = (
    204,
    300,
    302,
    305,
    *range(400, 408),
    410,
    416,
    421,
    426,
    451,
    *range(500, 503),
    504,
    511,
)
"""nginx cannot say 408, and closes the connection in its place."""

BUSY = (429, 503)
"""A server that says so is asked again twice, some seconds later."""


class ReleaseFallbackTests(NginxCase):
    """Archives of Debian without one of their release files."""

    def test_inrelease(self) -> None:
        """Release and Release.gpg are used in its place, whatever the server answers for it."""
        archive = Archive(self.signer, count=2, now=datetime.now(timezone.utc))
        for status in (*STATUSES, *BUSY):
            address = self.serve(
                archive.files, further=f"location ~ InRelease$ {{ return {status}; }}"
            )
            self.dest = self.place / str(status)
            code, report, errors = self.mirror(
                *("debian", str(self.dest), "--from", f"http://{address}/", "--suite", "sid"),
                *("--keyring", self.signer.keyring),
            )
            self.assertEqual((code, errors, report.get("failed")), (0, "", 0), status)
            there = {path.rpartition("/")[2] for path in self.found()}
            self.assertTrue({"Release", "Release.gpg"} <= there)
            self.assertNotIn("InRelease", there)
            self.assertGreater(check_readers(self.dest), 0)
            self.stack.close()

    def test_release(self) -> None:
        """InRelease is enough; without a signature nothing is believed."""
        archive = Archive(self.signer, count=2, now=datetime.now(timezone.utc))
        for refused, expected in (("Release(.gpg)?", 0), ("(InRelease|Release.gpg)", 1)):
            for status in (403, 404, 500):
                further = f"location ~ sid/{refused}$ {{ return {status}; }}"
                address = self.serve(archive.files, further=further)
                self.dest = self.place / f"{expected}{status}"
                code, _, errors = self.mirror(
                    *("debian", str(self.dest), "--from", f"http://{address}/", "--suite", "sid"),
                    *("--keyring", self.signer.keyring),
                )
                self.assertEqual(code, expected, errors)
                if expected:
                    self.assertEqual(errors.count("\n"), 1)
                    self.assertIn("is not signed; nothing of it was used", errors)
                    self.assertNotIn(f"{SUITE}/Release", self.found())

    def test_a_signature_for_another(self) -> None:
        """Where InRelease is refused, Release.gpg has to be that of Release."""
        archive = Archive(self.signer, count=2, now=datetime.now(timezone.utc))
        other = dict(archive.files)
        other[f"{SUITE}/Release.gpg"] = self.signer.detached(b"something else")
        address = self.serve(other, further="location ~ InRelease$ { return 403; }")
        code, _, errors = self.mirror(
            *("debian", str(self.dest), "--from", f"http://{address}/", "--suite", "sid"),
            *("--keyring", self.signer.keyring),
        )
        self.assertEqual((code, errors.count("\n")), (1, 1))
        self.assertIn("the signature does not fit it", errors)

    def test_repomd(self) -> None:
        """The signature of an RPM repository that nobody wants to see may be refused as well."""
        repository = RpmArchive(count=2)
        for status in (*STATUSES[:8], 403, 404, 500, 502, *BUSY[:1]):
            address = self.serve(
                repository.files, further=f"location ~ \\.asc$ {{ return {status}; }}"
            )
            self.dest = self.place / str(status)
            code, report, errors = self.mirror(
                *("rpm", str(self.dest), "--from", f"http://{address}/", "--allow-unsigned")
            )
            self.assertEqual((code, errors, report.get("failed")), (0, "", 0), status)
            self.assertIn(REPOMD, self.found())
            self.stack.close()
