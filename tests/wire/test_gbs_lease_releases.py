"""Releases of leases on the wire: there and back, and what is refused."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire import cbor
from pipegrid.wire.gbs_surveys_releases import (
    MAX_RELEASE_BYTES,
    pack_release_answers,
    pack_releases,
    unpack_release_answers,
    unpack_releases,
)
from pipegrid.wire.storage_messages import (
    MAX_RELEASES,
    LeaseRelease,
    LeaseReleases,
    ReleaseAnswers,
    Released,
)

ONE = LeaseRelease(b"i" * 16, b"c" * 32)


class LeaseReleaseMessageTests(SynchronousTestCase):
    """Both messages."""

    def test_there_and_back(self) -> None:
        """Also as many as there may be, which fit, and none."""
        for count in (0, 1, MAX_RELEASES):
            request = LeaseReleases(1 << 40, (ONE,) * count)
            packed = pack_releases(request)
            self.assertLessEqual(len(packed), MAX_RELEASE_BYTES)
            self.assertEqual(unpack_releases(packed), request)
            answers = ReleaseAnswers(5, (Released(1, 2, 1 << 50), 500)[: count % 3] * (count > 0))
            self.assertEqual(
                unpack_release_answers(pack_release_answers(answers), len(answers.results)), answers
            )

    def test_what_is_refused(self) -> None:
        """Too many, and fields of another kind or length."""
        bad: tuple[Any, ...] = (
            [],
            [1],
            [-1, []],
            [1, [[b"i" * 16, b"c" * 31]]],
            [1, [[b"i" * 15, b"c" * 32]]],
            [1, [[b"i" * 16]]],
            [1, [[b"i" * 16, b"c" * 32]] * (MAX_RELEASES + 1)],
            ["1", []],
        )
        for value in bad:
            self.assertRaises(ValueError, unpack_releases, cbor.dumps(value))
        self.assertRaises(ValueError, unpack_releases, b"\x82\x01\x9a\xff\xff\xff\xff")
        for value in (
            [1, []],
            [1, [5]],
            [1, [[1, 2]]],
            [1, [[1, 2, -1]]],
            [b"", [200]],
            [1, [200, 200]],
        ):
            self.assertRaises(ValueError, unpack_release_answers, cbor.dumps(value), 1)

    def test_secrets_are_not_shown(self) -> None:
        """In logs and tracebacks."""
        self.assertNotIn("ccc", repr(LeaseReleases(1, (ONE,))))
