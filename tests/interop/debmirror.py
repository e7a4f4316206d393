"""
Beside debmirror: what it leaves is what we leave, and run over ours it downloads no file.

Needs Debian's ``debmirror``; ``make mirror`` installs it.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from tests.cli.test_mirror_debian import DebianCase
from tests.mirror.archive import SUITE


class DebmirrorTests(DebianCase):
    """debmirror, with a directory and a key ring of its own."""

    def debmirror(self, dest: Path) -> str:
        """Run it; returns what it says."""
        home = Path(self.mktemp()).absolute()
        (home / ".gnupg").mkdir(parents=True, mode=0o700)
        host = self.url.removeprefix("http://").rstrip("/")
        done = subprocess.run(
            [
                *("debmirror", str(dest), "--method=http", f"--host={host}", "--root=/"),
                *("--dist=sid", "--section=main", "--arch=amd64", "--source", "--progress"),
                *("--nocleanup", "--diff=none", "--rsync-extra=none", "--verbose"),
                *("--keyring", self.signer.keyring),
            ],
            capture_output=True,
            text=True,
            timeout=110,
            env={**os.environ, "HOME": str(home), "LC_ALL": "C"},
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def tree(self, root: Path) -> dict[str, bytes]:
        """Packages and indexes that are there; the programs' own things and names by hash apart."""
        return {
            str(path.relative_to(root)): path.read_bytes()
            for kind in ("pool", "dists")
            for path in (root / kind).rglob("*")
            if path.is_file() and not path.is_symlink() and "by-hash" not in path.parts
        }

    async def _test_side_by_side(self) -> None:
        self.serve(self.made(count=60))
        status, _, err = await self.run_command(*self.arguments("--source"))
        self.assertEqual(status, 0, err)
        ours = self.tree(self.dest)
        self.server.asked.clear()
        said = await deferToThread(self.debmirror, self.dest)
        # Indexes it only has where it put them itself, so it asks for these in any other mirror.
        self.assertEqual([path for path in self.server.asked if "pool/" in path], [], said)
        self.assertIn("Files to download: 0 B", said)
        self.assertEqual(self.tree(self.dest), ours)
        theirs = Path(self.mktemp()).absolute()
        self.server.asked.clear()
        await deferToThread(self.debmirror, theirs)
        self.assertGreater(len(self.server.asked), 60)
        left = self.tree(theirs)
        self.assertEqual({p: d for p, d in ours.items() if p in left}, left)
        # What we have beside that: another form of an index, or of the release file.
        more = {path for path in ours if path not in left}
        self.assertTrue(
            all(
                re.search(r"(\.gz|\.xz|/InRelease|/Release(\.gpg)?)$", p) and SUITE in p
                for p in more
            ),
            more,
        )

    def test_side_by_side(self) -> Deferred[None]:
        """What debmirror has we have, byte by byte; run over ours it downloads no file."""
        return Deferred.fromCoroutine(self._test_side_by_side())
