"""What a storage directory has in it is for its owner alone, whatever the umask."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

from misc.command import command, environment
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.wire.storage_messages import ShareChange, SlotSecrets
from tests.storage.support import SECRETS, SI, StoreTestCase

OTHER_INDEX = b"o" * 16


class Modes:
    """Looks at modes."""

    def __init__(self, test: SynchronousTestCase, root: Path) -> None:
        self.seen = 0
        for where, _, files in os.walk(root):
            test.assertEqual(stat.S_IMODE(os.lstat(where).st_mode), 0o700, where)
            for name in files:
                path = os.path.join(where, name)
                test.assertEqual(stat.S_IMODE(os.lstat(path).st_mode), 0o600, path)
                self.seen += 1


class ModeTests(StoreTestCase):
    """A store, with a umask that forbids nothing."""

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(os.umask, os.umask(0))

    def test_everything_that_is_made(self) -> None:
        """Unfinished shares and their notes, whole ones, mutable ones, complaints, and all directories."""
        self.put(0, b"share")
        self.store.allocate(SI, {1}, 1 << 20, SECRETS)
        self.store.upload(SI, 1, SECRETS.upload).write(0, [b"x" * 100])
        self.store.close()  # which leaves a note
        self.store = self.make_store()
        self.store.slots.testv_and_readv_and_writev(
            OTHER_INDEX,
            SlotSecrets(SECRETS.lease, b"w" * 32),
            {0: ShareChange((), ((0, b"x"),))},
            (),
            False,
        )
        self.store.advise_corrupt_share(SI, 0, "bad")
        self.assertGreaterEqual(Modes(self, self.root).seen, 5)
        self.assertTrue(self.final(0).exists())
        index = base32.encode(OTHER_INDEX)
        self.assertTrue((self.root / "shares" / index[:2] / index / "0").exists())


class CommandTests(SynchronousTestCase):
    """The grid that the first command makes."""

    def test_commands(self) -> None:
        """A file, one that is changed, a directory: another user can read none of their shares."""
        directory = Path(self.mktemp()).absolute()
        file = directory.with_name("file")
        file.write_bytes(b"more than fifty-five bytes " * 9)
        self.addCleanup(os.umask, os.umask(0))
        for words in (["init"], ["put", str(file)], ["put", "--mutable", str(file)], ["mkdir"]):
            done = subprocess.run(
                command(directory, *words), env=environment(), capture_output=True, timeout=60
            )
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertGreaterEqual(Modes(self, directory / "storage").seen, 30)
        self.assertEqual(stat.S_IMODE((directory / "private").stat().st_mode), 0o700)
