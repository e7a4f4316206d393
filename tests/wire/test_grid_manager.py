"""Certificates of grid managers: who may be given shares."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from pipegrid.core import base32
from pipegrid.errors import UsageError
from pipegrid.wire.announcements import (
    SERVICE,
    Announcement,
    AnnouncementRecords,
    describe,
    make_signing_key,
)
from pipegrid.wire.grid_manager_certificates import (
    CERTIFICATES,
    MAX_CERTIFICATES,
    MAX_READ_CERTIFICATES,
    Certification,
    ManagerKey,
    certified_by,
    in_words,
    parse_certificate,
    parse_manager_key,
    read_certificates,
)

TAHOE_PYTHON = Path(__file__).parents[2] / ".venv-tahoe/bin/python"
PROGRAM = Path(__file__).with_name("tahoe_grid_manager.txt")
NURL = f"pb://{'A' * 43}@127.0.0.1:9/swissnum#v=1"

MANAGER, OTHER, SERVER = make_signing_key(), make_signing_key(), make_signing_key()


def manager(key: Any = MANAGER) -> ManagerKey:
    """Return the public half of a manager's key, as a user writes it."""
    return parse_manager_key("alice", key.public_text)


def certificate(
    expires: object = "2027-01-31T12:00:00+00:00", key: Any = MANAGER, **fields: object
) -> dict[str, str]:
    """Return a certificate as it is announced."""
    said = {"expires": expires, "public_key": SERVER.public_text, "version": 1, **fields}
    text = json.dumps(said)
    return {"certificate": text, "signature": base32.encode(key.sign(text.encode()))}


def reason(announced: object, now_s: float = 1_800_000_000.0, *managers: ManagerKey) -> str | None:
    """Return why the server is given no shares."""
    found = read_certificates(announced)
    certified = certified_by(SERVER.server_id, found, managers or (manager(),))
    return Certification(certified, lambda: now_s)()


class CertificateTests(SynchronousTestCase):
    """By themselves."""

    def test_valid_until_it_expires(self) -> None:
        """To the second, whatever the zone that it is written in."""
        end_s = 1_801_396_800.0  # by ``date -d 2027-01-31T12:00:00Z +%s``
        for text in ("2027-01-31T12:00:00+00:00", "2027-01-31T14:00:00+02:00"):
            announced = [certificate(text)]
            self.assertIsNone(reason(announced, end_s - 1))
            said = reason(announced, end_s)
            assert said is not None
            self.assertIn("its certificate of grid manager alice has expired (2027-01-31T", said)

    def test_the_longest_counts(self) -> None:
        """In whatever order they are announced."""
        announced = [certificate(), certificate("2020-01-01T00:00:00+00:00")]
        for each in (announced, announced[::-1]):
            self.assertIsNone(reason(each))

    def test_worth_nothing(self) -> None:
        """Another server's, another manager's, changed, malformed, too large; nothing of it is an error."""
        good = certificate()
        announced: Any
        for announced in (
            None,
            [],
            {},
            "x",
            [None, 7, [], {}],
            [{"certificate": 1, "signature": 2}],
            [{"certificate": good["certificate"]}],
            [certificate(public_key=OTHER.public_text)],
            [certificate(public_key=SERVER.server_id)],
            [certificate(key=OTHER)],
            [{**good, "certificate": good["certificate"].replace("2027", "2028")}],
            [{**good, "signature": good["signature"][:-1]}],
            [{**good, "signature": "1" * 103}],
            [certificate("2027-01-31T12:00:00")],  # of no zone
            [certificate(7)],
            [certificate("tomorrow")],
            [certificate("9999-12-31T23:59:59-23:59", x="x" * 1000)],
            [certificate(public_key=None)],
            [{**good, "certificate": "[" * 500}],
            [{}] * MAX_READ_CERTIFICATES + [good],
            [certificate("2028-01-01T00:00:00+00:00", OTHER)] * MAX_CERTIFICATES + [good],
        ):
            self.assertEqual(
                reason(announced), "it has no certificate of a configured grid manager"
            )
        self.assertIsNone(reason([None, {}, good]))
        self.assertIsNone(reason([good], 0.0, manager(OTHER), manager()))

    def test_keys(self) -> None:
        """A manager's key is written as Tahoe-LAFS writes it."""
        self.assertEqual(str(manager()), MANAGER.public_text)
        for text in ("", "v0-" + "a" * 52, "pub-v1-" + "a" * 52, "pub-v0-" + "1" * 52, "pub-v0-a"):
            with self.assertRaises(UsageError) as caught:
                parse_manager_key("bob", text)
            self.assertIn("grid manager 'bob'", str(caught.exception))

    def test_as_tahoe_decides(self) -> None:
        """The same certificates, given to Tahoe-LAFS in its own process; also while they expire."""
        if not TAHOE_PYTHON.exists():
            raise SkipTest("Tahoe-LAFS is not installed")
        done = subprocess.run(
            [str(TAHOE_PYTHON), str(PROGRAM)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        cases = json.loads(done.stdout)
        self.assertGreaterEqual(len(cases), 18)
        self.assertEqual({case["uploads"] for case in cases}, {True, False})
        for case in cases:
            managers = [parse_manager_key("m", text) for text in case["managers"]]
            found = read_certificates(case["certificates"])
            certified = certified_by(case["server_id"], found, managers)
            uploads = not managers or Certification(certified)() is None
            self.assertEqual(uploads, case["uploads"], case["name"])
            for at_s, expected in case["later"]:
                uploads = not managers or Certification(certified, partial(float, at_s))() is None
                self.assertEqual(uploads, expected, (case["name"], at_s))
        later = [tuple(each for _, each in case["later"]) for case in cases]
        self.assertGreaterEqual(len(set(later)), 4)


class FileTests(SynchronousTestCase):
    """Files of certificates, and durations for people."""

    def test_parsed(self) -> None:
        """As announced; what clients could not use is refused."""
        good = certificate()
        self.assertEqual(parse_certificate(json.dumps(good).encode())._asdict(), good)
        wrong: Any
        for wrong in (
            None,
            [],
            {},
            {**good, "x": 1},
            {**good, "signature": 1},
            {**good, "signature": "1" * 103},
            certificate("2027-01-31T12:00:00"),
            certificate(7),
            certificate(public_key=[]),
            certificate(x="x" * 512),
        ):
            self.assertRaises(ValueError, parse_certificate, json.dumps(wrong).encode())
        for data in (b"", b"\xff", b"[" * 100_000):
            self.assertRaises(ValueError, parse_certificate, data)

    def test_in_words(self) -> None:
        """Two units at least, so that what is said is not far off."""
        for seconds, words in (
            (0, "0 minutes"),
            (-5, "0 minutes"),
            (100, "1 minute"),
            (7199, "119 minutes"),
            (7200, "2 hours"),
            (172_799, "47 hours"),
            (172_800, "2 days"),
            (86400 * 400.5, "400 days"),
        ):
            self.assertEqual(in_words(seconds), words)


class AnnouncedTests(SynchronousTestCase):
    """In what servers announce."""

    def announcement(self, *certificates: dict[str, str]) -> Announcement:
        """Return one of the server's."""
        fields = {
            "service-name": SERVICE,
            "anonymous-storage-NURLs": [NURL],
            CERTIFICATES: list(certificates),
        }
        return Announcement(SERVER.server_id, fields)

    def test_the_one_that_counts_is_kept(self) -> None:
        """Of all that are announced, where there are managers; none where there are not."""
        other = certificate("2029-01-01T00:00:00+00:00", key=OTHER)
        old = certificate("2026-01-01T00:00:00+00:00")
        announced = self.announcement(other, old, certificate())
        book = AnnouncementRecords(managers=[manager()])
        self.assertTrue(book.hear(announced))
        (known,) = book.announcements
        self.assertEqual(known.fields[CERTIFICATES], [certificate()])
        self.assertFalse(book.hear(announced))
        self.assertEqual(len(describe(known.server_id, known.fields).certificates), 1)
        for managers in ((), [manager(make_signing_key())]):
            book = AnnouncementRecords(managers=managers)
            self.assertTrue(book.hear(announced))
            self.assertNotIn(CERTIFICATES, book.announcements[0].fields)
        self.assertEqual(len(describe(SERVER.server_id, announced.fields).certificates), 3)
