"""A storage server announces itself: what stays the same, what grows, and introducers that are down."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from twisted.logger import formatEvent
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.errors import RemoteCallError, UsageError
from pipegrid.server import announce
from pipegrid.server.announce import Announcer, load_or_create, storage_fields
from pipegrid.wire.announcements import BUNDLES, describe, sign, verify
from pipegrid.wire.gbs_bundles import MAX_BUNDLE_BYTES
from tests import vectors
from tests.grid.introducer_support import FURL, FakeIntroducer, nurl

RECORDED = vectors.load("introducer")


class IdentityTests(SynchronousTestCase):
    """The files."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        (self.directory / "private").mkdir(parents=True)

    def test_made_once(self) -> None:
        """Key and seed stay; the number grows with every start."""
        first = load_or_create(self.directory, b"t" * 20, has_shares=False)
        second = load_or_create(self.directory, b"t" * 20, has_shares=True)
        self.assertEqual(first.key, second.key)
        self.assertEqual(first.permutation_seed, second.permutation_seed)
        self.assertEqual(first.permutation_seed, first.key.public_bytes)
        self.assertEqual((first.seqnum, second.seqnum), (1, 2))
        key_file = self.directory / "private" / "node.privkey"
        self.assertEqual(key_file.stat().st_mode & 0o777, 0o600)
        self.assertEqual(
            (self.directory / "node.pubkey").read_text().strip(), first.key.public_text
        )

    def test_shares_without_a_seed(self) -> None:
        """A server that had shares before there were seeds keeps its place, that of its tub id."""
        made = load_or_create(self.directory, b"t" * 20, has_shares=True)
        self.assertEqual(made.permutation_seed, b"t" * 20)

    def test_taken_over(self) -> None:
        """The files of a Tahoe-LAFS node are used."""
        (self.directory / "private" / "node.privkey").write_text(RECORDED["signing_key"] + "\n")
        (self.directory / "permutation-seed").write_text(base32.encode(b"p" * 20) + "\n")
        (self.directory / "announcement-seqnum").write_text("41\n")
        found = load_or_create(self.directory, b"t" * 20, has_shares=True)
        self.assertEqual(found.key.server_id, RECORDED["signed"]["key"])
        self.assertEqual((found.permutation_seed, found.seqnum), (b"p" * 20, 42))

    def test_a_full_disk(self) -> None:
        """The number goes over the one before, whatever stands around that; with none there, it is said."""

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        path = self.directory / "announcement-seqnum"
        load_or_create(self.directory, b"t" * 20, has_shares=True)
        self.patch(announce, "replace_file", full)
        for before, number in (("  41 \n\n", 42), ("99", 100), ("100\n", 101)):
            path.write_text(before)
            found = load_or_create(self.directory, b"t" * 20, has_shares=True)
            self.assertEqual((found.seqnum, int(path.read_text())), (number, number))
            self.assertGreaterEqual(path.stat().st_size, len(before))
        path.unlink()
        with self.assertRaisesRegex(UsageError, "No space left on device; free some space$"):
            load_or_create(self.directory, b"t" * 20, has_shares=True)

    def test_files_that_hold_something_else(self) -> None:
        """Each is named, and left as it is."""
        for name, text in (
            ("private/node.privkey", "x"),
            ("permutation-seed", "1"),
            ("permutation-seed", ""),
            ("announcement-seqnum", "many"),
        ):
            path = self.directory / name
            path.write_text(text)
            with self.assertRaises(UsageError) as caught:
                load_or_create(self.directory, b"t" * 20, has_shares=False)
            self.assertIn(str(path), str(caught.exception))
            self.assertEqual(path.read_text(), text)
            path.unlink()

    def test_fields(self) -> None:
        """Clients read from the announcement who and where the server is."""
        identity = load_or_create(self.directory, b"t" * 20, has_shares=True)
        fields = storage_fields(identity, nickname="n", nurls=[nurl(1)], furl=str(FURL))
        heard = verify(sign(fields, identity.key))
        # One more than Tahoe-LAFS's, which its clients pass over.
        self.assertEqual(set(RECORDED["announcement"]) | {BUNDLES}, set(heard.fields))
        known = describe(heard.server_id, heard.fields)
        self.assertEqual(known.identity.nickname, "n")
        self.assertEqual(known.identity.permutation_seed, b"t" * 20)
        self.assertEqual((str(known.nurl), known.furl), (nurl(1), FURL))
        self.assertEqual(known.bundle_bytes, MAX_BUNDLE_BYTES)
        fields = storage_fields(identity, nickname="n", nurls=[nurl(1)], furl=None)
        self.assertNotIn("anonymous-storage-FURL", fields)


class AnnouncerTests(SynchronousTestCase):
    """Telling introducers."""

    def test_again_after_every_loss(self) -> None:
        """Whoever was away is told when he is back."""
        clock, introducer = Clock(), FakeIntroducer()
        signed = (b"message", b"signature", b"key")
        announcer = Announcer({"one": FURL}, signed, introducer.connect, clock, object)
        announcer.start()
        self.assertEqual(introducer.published, [signed])
        introducer.down = ConnectionRefusedError()
        introducer.lose()
        clock.pump([1.0] * 30)
        self.assertEqual(len(introducer.published), 1)
        introducer.down = None
        clock.pump([1.0] * 60)
        self.assertEqual(introducer.published, [signed] * 2)
        announcer.stop()
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_an_introducer_that_refuses(self) -> None:
        """Why is said, once; then it is tried again, until the announcement is accepted."""
        said: list[str] = []
        self.patch(announce.log, "observer", lambda event: said.append(formatEvent(event)))
        clock, introducer = Clock(), FakeIntroducer()
        introducer.taken = fail(RemoteCallError("the announcement is refused: no space\x1b\nmore"))
        announcer = Announcer({"one": FURL}, (b"m", b"s", b"k"), introducer.connect, clock, object)
        announcer.start()
        introducer.taken = fail(RemoteCallError("the announcement is refused: no space"))
        clock.pump([1.0] * 3)
        introducer.taken = None
        clock.pump([1.0] * 10)
        self.assertEqual(
            said,
            [
                "introducer one at intro.example.org:1 does not accept the announcement: the announcement "
                r"is refused: no space\x1b; it is tried again",
                "announced to introducer one at intro.example.org:1",
            ],
        )
        announcer.stop()

    def test_an_introducer_that_never_answers(self) -> None:
        """Its connection stands, and nobody hears of the server: that is said, once."""
        said: list[str] = []
        self.patch(announce.log, "observer", lambda event: said.append(formatEvent(event)))
        clock, introducer = Clock(), FakeIntroducer()
        introducer.taken = Deferred()
        signed = (b"message", b"signature", b"key")
        announcer = Announcer({"one": FURL}, signed, introducer.connect, clock, object)
        announcer.start()
        clock.pump([1.0] * 59)
        self.assertEqual(said, [])
        clock.pump([1.0] * 100)
        (sentence,) = said
        self.assertIn("introducer one at intro.example.org:1 has not acknowledged", sentence)
        introducer.taken.callback(None)
        self.assertIn("announced to introducer one", said[-1])
        introducer.lose()
        announcer.stop()
        self.assertEqual(clock.getDelayedCalls(), [])
