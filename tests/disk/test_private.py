"""Files for nobody else to read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.private_files import make_directory, open_private

REWRITE = os.O_WRONLY | os.O_TRUNC


class OpenPrivateTests(SynchronousTestCase):
    """``open_private``."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp())
        self.addCleanup(os.umask, os.umask(0o022))

    def mode(self) -> int:
        """Return what others may do with the file."""
        return stat.S_IMODE(self.path.stat().st_mode)

    def write(self, flags: int = REWRITE) -> None:
        """Write to it."""
        with os.fdopen(open_private(str(self.path), flags), "wb") as file:
            file.write(b"secret")

    def test_new(self) -> None:
        """A new one is its owner's."""
        self.write()
        self.assertEqual((self.mode(), self.path.read_bytes()), (0o600, b"secret"))

    def test_old(self) -> None:
        """One that is there becomes so, and is written anew or appended to, as was asked."""
        self.path.write_text("public and long")
        self.path.chmod(0o644)
        self.write()
        self.assertEqual((self.mode(), self.path.read_bytes()), (0o600, b"secret"))
        self.write(os.O_WRONLY | os.O_APPEND)
        self.assertEqual(self.path.read_bytes(), b"secretsecret")

    def test_links(self) -> None:
        """Symbolic links are refused, whether they lead to something or not, with a sentence."""
        target = Path(self.mktemp())
        self.path.symlink_to(target)
        for content in (None, "precious"):
            if content:
                target.write_text(content)
            error = self.assertRaises(OSError, open_private, str(self.path), REWRITE)
            self.assertIn("symbolic link", str(error))
        self.assertEqual(target.read_text(), "precious")

    def test_devices(self) -> None:
        """Devices stay as they are."""
        before = os.stat(os.devnull).st_mode
        os.close(open_private(os.devnull, REWRITE))
        self.assertEqual(os.stat(os.devnull).st_mode, before)


class MakeDirectoryTests(SynchronousTestCase):
    """``make_directory``."""

    def test_modes(self) -> None:
        """Nobody else may write there, nor above, however lax the umask is; a stricter one counts."""
        for mask, modes in ((0, [0o755, 0o755, 0o700]), (0o077, [0o700] * 3)):
            top = Path(self.mktemp())
            before = os.umask(mask)
            try:
                make_directory(top / "node/private", 0o700)
                make_directory(top / "node/private", 0o700)
            finally:
                os.umask(before)
            made = [top, top / "node", top / "node/private"]
            self.assertEqual([stat.S_IMODE(each.stat().st_mode) for each in made], modes)

    def test_what_is_in_the_way(self) -> None:
        """It is an error, as is a place where nothing can be made."""
        path = Path(self.mktemp())
        path.write_text("a file")
        for each in (path, path / "below"):
            self.assertRaises(OSError, make_directory, each)

    def test_where_nothing_can_be(self) -> None:
        """A place that says "no such file" whatever is above it is an error, too, and not tried for ever."""
        for each in (Path("/proc/none"), Path("/proc/none/below")):
            self.assertRaises(FileNotFoundError, make_directory, each)
        gone = Path(self.mktemp())
        gone.mkdir()
        before = os.open(".", os.O_RDONLY)
        self.addCleanup(os.close, before)
        self.addCleanup(os.fchdir, before)
        os.chdir(gone)
        Path.cwd().rmdir()
        self.assertRaises(FileNotFoundError, make_directory, Path("node/private"))
