"""The heads of GBS messages."""

from __future__ import annotations

import base64

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.wire import gbs_paths_headers
from pipegrid.wire.gbs_paths_headers import GbsTarget, Resource

SI = bytes(range(16))
SI_TEXT = "aaaqeayeaudaocajbifqydiob4"


class PathTests(SynchronousTestCase):
    """Addresses."""

    def test_paths_lead_where_they_were_made_for(self) -> None:
        """Every path that a client makes is understood by a server."""
        for path, target in (
            (gbs_paths_headers.VERSION_PATH, GbsTarget(Resource.VERSION)),
            (gbs_paths_headers.allocate_path(SI), GbsTarget(Resource.ALLOCATE, SI)),
            (gbs_paths_headers.shares_path(SI), GbsTarget(Resource.SHARES, SI)),
            (gbs_paths_headers.share_path(SI, 255), GbsTarget(Resource.SHARE, SI, 255)),
            (gbs_paths_headers.abort_path(SI, 0), GbsTarget(Resource.ABORT, SI, 0)),
            (gbs_paths_headers.corrupt_path(SI, 7), GbsTarget(Resource.CORRUPT, SI, 7)),
            (gbs_paths_headers.lease_path(SI), GbsTarget(Resource.LEASE, SI)),
            (f"/storage/v1/mutable/{SI_TEXT}/shares", GbsTarget(Resource.MUTABLE_SHARES, SI)),
            (f"/storage/v1/mutable/{SI_TEXT}/7", GbsTarget(Resource.MUTABLE_SHARE, SI, 7)),
            (
                f"/storage/v1/mutable/{SI_TEXT}/read-test-write",
                GbsTarget(Resource.MUTABLE_READ_TEST_WRITE, SI),
            ),
        ):
            self.assertEqual(gbs_paths_headers.parse_path(path), target)

    def test_other_paths_lead_nowhere(self) -> None:
        """Dots, escapes, NULs, odd slashes, absurd numbers and sloppy indexes are no addresses."""
        share = gbs_paths_headers.share_path(SI, 1)
        for path in (
            "",
            "/",
            "*",
            "/storage/v1",
            "/storage/v1/",
            "/storage/v2/version",
            "/storage/v1/version/",
            "/storage/v1/versio%6e",
            "//storage/v1/version",
            "/storage/v1/../v1/version",
            "/storage/v1/%2e%2e/v1/version",
            share + "/",
            share + "/..",
            share + "/../0",
            share + "/%2e%2e",
            share + "\0",
            share + "\n",
            share + "%00",
            share + "?x",
            share + "/shares",
            share + "/read-test-write",
            gbs_paths_headers.allocate_path(SI) + "/-1",
            gbs_paths_headers.allocate_path(SI) + "/+1",
            gbs_paths_headers.allocate_path(SI) + "/1.0",
            gbs_paths_headers.allocate_path(SI) + "/0x1",
            gbs_paths_headers.allocate_path(SI) + "/１",
            gbs_paths_headers.allocate_path(SI) + "/" + "9" * 10,
            gbs_paths_headers.allocate_path(SI) + "/" + "9" * 5000,
            gbs_paths_headers.allocate_path(SI) + "/abort",
            gbs_paths_headers.allocate_path(SI) + "//1",
            f"/storage/v1/immutable/{SI_TEXT[:-1]}",
            f"/storage/v1/immutable/{SI_TEXT}a",
            f"/storage/v1/immutable/{SI_TEXT.upper()}",
            f"/storage/v1/immutable/{SI_TEXT[:-1]}5",  # stray bits
            f"/storage/v1/immutable/..{SI_TEXT[2:]}",
            f"/storage/v1/lease/{SI_TEXT}/1",
            f"/storage/v1/lease/{SI_TEXT}/shares",
            f"/storage/v1/mutable/{SI_TEXT}",
            f"/storage/v1/mutable/{SI_TEXT}/1/abort",
        ):
            self.assertIsNone(gbs_paths_headers.parse_path(path), path[:100])

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.binary(min_size=16, max_size=16))
    def test_storage_indexes_come_back(self, storage_index: bytes) -> None:
        """Every storage index has one spelling."""
        text = base32.encode(storage_index)
        self.assertEqual(gbs_paths_headers.decode_storage_index(text), storage_index)
        self.assertIsNone(gbs_paths_headers.decode_storage_index(text[:-1] + "b"))


class SecretTests(SynchronousTestCase):
    """Authorisation and secrets."""

    def test_authorization(self) -> None:
        """The value is that of the recorded requests."""
        value = gbs_paths_headers.authorization("yergyyx6ik6krfzxcgaic6oyibvvo6t2")
        self.assertEqual(value, b"Tahoe-LAFS eWVyZ3l5eDZpazZrcmZ6eGNnYWljNm95aWJ2dm82dDI=")

    def test_secrets_come_back(self) -> None:
        """What a client sends is what a server gets."""
        secrets = {
            gbs_paths_headers.RENEW_SECRET: b"r" * 32,
            gbs_paths_headers.CANCEL_SECRET: b"c" * 32,
            gbs_paths_headers.UPLOAD_SECRET: b"u",
        }
        lines = gbs_paths_headers.secret_lines(secrets)
        self.assertEqual(
            gbs_paths_headers.parse_secrets(lines, gbs_paths_headers.ALLOCATE_SECRETS), secrets
        )
        self.assertEqual(gbs_paths_headers.parse_secrets([], gbs_paths_headers.NO_SECRETS), {})

    def test_exactly_the_right_secrets(self) -> None:
        """Missing, extra, unknown, doubled, empty, misspelt or short secrets are refused, unrepeated."""
        good = gbs_paths_headers.secret_lines({gbs_paths_headers.UPLOAD_SECRET: b"geheim"})
        gbs_paths_headers.parse_secrets(good, gbs_paths_headers.UPLOAD_SECRETS)
        encoded = base64.b64encode(b"geheim")
        for lines in (
            [],
            [*good, *good],
            good + gbs_paths_headers.secret_lines({gbs_paths_headers.RENEW_SECRET: b"r" * 32}),
            [b"upload-secret"],
            [b"upload-secret "],
            [b"upload-secret !" + encoded],
            [b"upload-secret " + encoded + b"="],
            [b"upload-secret Z2Vo ZWlt"],
            [b"upload-secret Z2Vo\nZWlt"],
            [b"Upload-Secret " + encoded],
            [b"upload " + encoded],
            [encoded],
            [b""],
            [b"\xff\xfe " + encoded],
        ):
            error = self.assertRaises(
                ValueError, gbs_paths_headers.parse_secrets, lines, gbs_paths_headers.UPLOAD_SECRETS
            )
            self.assertNotIn("Z2Vo", str(error))
        for length in (0, 31, 33):
            short = gbs_paths_headers.secret_lines({gbs_paths_headers.RENEW_SECRET: b"r" * length})
            both = short + gbs_paths_headers.secret_lines(
                {gbs_paths_headers.CANCEL_SECRET: b"c" * 32}
            )
            self.assertRaises(
                ValueError, gbs_paths_headers.parse_secrets, both, gbs_paths_headers.LEASE_SECRETS
            )


class RangeTests(SynchronousTestCase):
    """Ranges, whose end is exclusive here and inclusive on the wire."""

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.integers(0, 1 << 64), st.integers(1, 1 << 40))
    def test_formatting_and_parsing_agree(self, begin: int, length: int) -> None:
        """Every range comes back from its text."""
        pair = begin, begin + length
        self.assertEqual(gbs_paths_headers.parse_range(gbs_paths_headers.format_range(*pair)), pair)
        self.assertEqual(
            gbs_paths_headers.parse_content_range(gbs_paths_headers.format_content_range(*pair)),
            pair,
        )

    def test_strange_ranges(self) -> None:
        """Open, suffix, several, backward and foreign ranges are refused."""
        for value in (
            b"bytes=5-",
            b"bytes=-5",
            b"bytes=0-1,3-4",
            b"items=0-3",
            b"bytes=9-5",
            b"garbage",
            b"",
            b"bytes=0x1-2",
            b"bytes=0-" + b"9" * 40,
            b"bytes=1_0-2_0",
        ):
            self.assertRaises(ValueError, gbs_paths_headers.parse_range, value)

    def test_strange_content_ranges(self) -> None:
        """A range must be there, forward, and within the whole if that is given."""
        self.assertEqual(gbs_paths_headers.parse_content_range(b"bytes 20-29/55"), (20, 30))
        for value in (
            b"bytes */100",
            b"bytes 0-9",
            b"bytes 0-9/",
            b"bytes 9-0/*",
            b"bytes 0-9/9",
            b"bytes=0-9/*",
            b"items 0-9/*",
            b"bytes 0-9/*, 20-29/*",
            b"",
        ):
            self.assertRaises(ValueError, gbs_paths_headers.parse_content_range, value)
