"""The certificates of a storage server: installed, announced, expired, and announced again."""

from __future__ import annotations

import errno
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet.task import Clock
from twisted.logger import formatEvent
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import SinkError, UsageError
from pipegrid.grid.manager_directory import certificate_for, certificate_text
from pipegrid.server import server_certificates
from pipegrid.server.announce import Announcer
from pipegrid.server.server_certificates import (
    MAX_FILES,
    CertificateWatch,
    install,
    installed_files,
    own_public_key,
    path_of,
)
from pipegrid.wire.announcements import AnnouncementKey, make_signing_key
from pipegrid.wire.grid_manager_certificates import MAX_CERTIFICATES, MAX_FILE_BYTES
from tests.grid.introducer_support import FURL, FakeIntroducer

MANAGER, SERVER, OTHER = make_signing_key(), make_signing_key(), make_signing_key()
DAY_S = 86400.0


def certificate(left_s: float = 30 * DAY_S, key: AnnouncementKey = SERVER) -> bytes:
    """Return the file of a certificate."""
    expires = datetime.fromtimestamp(time.time() + left_s, timezone.utc)
    return certificate_text(certificate_for(MANAGER, key.public_text, expires)).encode()


class CertificatesTestCase(SynchronousTestCase):
    """A server's directory, and what the log says."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.said: list[str] = []
        self.patch(
            server_certificates.log, "observer", lambda event: self.said.append(formatEvent(event))
        )

    def install(self, data: bytes, manager: str = "default") -> None:
        """Install a certificate."""
        install(self.directory, SERVER.public_text, manager, data, "FILE")


class InstallTests(CertificatesTestCase):
    """``grid-manager install``."""

    def test_renewed(self) -> None:
        """In place of the earlier one of this manager; that of another manager stays."""
        first, second = certificate(), certificate(60 * DAY_S)
        self.install(first)
        self.install(first, "bob")
        self.install(second)
        files = installed_files(self.directory)
        self.assertEqual([each.name for each in files], ["bob.cert", "default.cert"])
        self.assertEqual([each.read_bytes() for each in files], [first, second])

    def test_refused(self) -> None:
        """What would be of no use, or is no certificate, in a sentence; the earlier one stays."""
        good = certificate()
        self.install(good)
        for data, words in (
            (b"", "it is not JSON"),
            (b"[" * 4000, "it is not JSON"),
            (b"{}", "'certificate' and 'signature'"),
            (good[:-2] + b',"x":1}', "'certificate' and 'signature'"),
            (good.replace(b'"signature": "', b'"signature": "1'), "a field of it is damaged"),
            (good.replace(b"expires", b"expired"), "a field of it is damaged"),
            (good + b" " * MAX_FILE_BYTES, "more than 4096 bytes"),
            (certificate(key=OTHER), f"a certificate for {OTHER.public_text}, and the server in"),
            (certificate(-60), "ask the grid manager for a new certificate"),
        ):
            with self.assertRaises(UsageError) as caught:
                self.install(data)
            self.assertIn(words, str(caught.exception))
            self.assertEqual(path_of(self.directory, "default").read_bytes(), good)
        for name in ("", " ", "a/b", "..", ".x", "-x", "a\nb", "x" * 101):
            with self.assertRaisesRegex(UsageError, "grid manager's name"):
                self.install(good, name)

    def test_a_full_disk(self) -> None:
        """The earlier one stays."""
        good = certificate()
        self.install(good)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with (
            mock.patch.object(server_certificates, "replace_file", side_effect=full),
            self.assertRaisesRegex(SinkError, "nothing was changed; free some space"),
        ):
            self.install(certificate())
        self.assertEqual(path_of(self.directory, "default").read_bytes(), good)

    def test_whose_directory(self) -> None:
        """The server's key is in ``node.pubkey``, which its first announcement makes."""
        with self.assertRaisesRegex(UsageError, "it has no node.pubkey; start one with"):
            own_public_key(self.directory)
        (self.directory / "node.pubkey").write_text(f"{SERVER.public_text}\n")
        self.assertEqual(own_public_key(self.directory), SERVER.public_text)
        (self.directory / "node.pubkey").write_text("x")
        with self.assertRaisesRegex(UsageError, "restore it"):
            own_public_key(self.directory)


class WatchTests(CertificatesTestCase):
    """What a running server announces, and logs."""

    def watch(self, *files: Path) -> CertificateWatch:
        """Return one whose clock is ``self.now_s``."""
        self.now_s = time.time()
        return CertificateWatch(files, self.directory, SERVER.public_text, lambda: self.now_s)

    def test_states(self) -> None:
        """Valid, near expiry, expired: a line of the log for each, once; also when the clock jumps back."""
        self.install(certificate(10 * DAY_S))
        watch = self.watch()
        announced = watch.read()
        self.assertEqual(len(announced), 1)
        start_s = self.now_s
        for day, words in (
            (0, "is valid until"),
            (2, ""),
            (3.5, "expires in 6 days, on"),
            (4.5, ""),
            (10.5, "expired on"),
            (11, ""),
            (-300, "is valid until"),
            (10.5, "expired on"),
        ):
            if day:
                self.said.clear()
            self.now_s = start_s + day * DAY_S
            # Whether it still counts is for clients to decide, by their own clocks.
            self.assertEqual(watch.look(), announced)
            self.assertEqual(len(self.said), bool(words), (day, self.said))
            self.assertIn(words, "".join(self.said))

    def test_changed(self) -> None:
        """A renewed one is announced; damage is reported once, and what was announced remains."""
        path = self.directory / "own.cert"
        path.write_bytes(certificate())
        watch = self.watch(path)
        first = watch.read()
        self.install(certificate(60 * DAY_S))
        second = watch.look()
        assert second is not None
        self.assertEqual(second[1:], first)
        self.said.clear()
        path.write_bytes(b"{")
        self.assertEqual([watch.look(), watch.look()], [None, None])
        (sentence,) = self.said
        self.assertIn(f"{path} is not a certificate of a grid manager: it is not JSON", sentence)
        path.unlink()
        self.assertIsNone(watch.look())
        path.write_bytes(certificate())
        self.assertEqual(len(watch.look() or ()), 2)

    def test_of_another_server(self) -> None:
        """It is not announced, since clients would pass it over."""
        path = self.directory / "own.cert"
        path.write_bytes(certificate(key=OTHER))
        self.assertEqual(self.watch(path).read(), [])
        self.assertIn(f"it is for the server {OTHER.public_text}, and this one is", self.said[0])

    def test_many(self) -> None:
        """Those that are valid longest; of too many files none is guessed."""
        for number in range(MAX_CERTIFICATES + 2):
            self.install(certificate((number + 1) * DAY_S), f"m{number}")
        announced = self.watch().read()
        self.assertEqual(len(announced), MAX_CERTIFICATES)
        texts = [each["certificate"] for each in announced]
        self.assertEqual(texts, sorted(texts, reverse=True))
        for number in range(MAX_FILES):
            self.install(certificate(), f"n{number}")
        with self.assertRaisesRegex(UsageError, "more than 64 certificates"):
            self.watch().read()

    def test_hidden_files(self) -> None:
        """What a killed process has left is no certificate."""
        self.install(certificate())
        place = self.directory / "certificates"
        for name in (".default.cert.pipegrid-part", "README", "default.cert~"):
            (place / name).write_bytes(b"x")
        self.assertEqual(len(self.watch().read()), 1)


class AnnouncedAgainTests(SynchronousTestCase):
    """An announcement replaces the one before."""

    def test_replaced(self) -> None:
        """At once where an introducer is connected; later where it is down; never after the end."""
        clock, introducer = Clock(), FakeIntroducer()
        first: Any = (b"1", b"", b"")
        second: Any = (b"2", b"", b"")
        announcer = Announcer({"one": FURL}, first, introducer.connect, clock, object)
        announcer.start()
        announcer.replace(second)
        self.assertEqual(introducer.published, [first, second])
        introducer.down = ConnectionRefusedError()
        introducer.lose()
        clock.pump([1.0] * 30)
        announcer.replace(first)
        clock.pump([1.0] * 30)
        self.assertEqual(introducer.published, [first, second])
        introducer.down = None
        clock.pump([1.0] * 90)
        self.assertEqual(introducer.published, [first, second, first])
        announcer.stop()
        announcer.replace(second)
        clock.pump([1.0] * 90)
        self.assertEqual(introducer.published, [first, second, first])
        self.assertEqual(clock.getDelayedCalls(), [])
