"""``forget``, ``prune``, pins and ``space`` as users meet them: real processes on an embedded grid."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

KILLS = 3


class ForgetPruneCommandTests(SynchronousTestCase):
    """A home with a directory to back up."""

    def setUp(self) -> None:
        self.home = Path(self.mktemp()).absolute()
        self.photos = self.home / "photos"
        self.photos.mkdir(parents=True)
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIPEGRID", "XDG"))
        } | {"HOME": str(self.home)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "pipegrid", *arguments],
            env=self.env,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_command(self, *arguments: str, status: int = 0) -> str:
        """Run a command; return what it printed on both."""
        process = self.start(*arguments)
        out, complaints = process.communicate(timeout=100)
        self.assertEqual(process.returncode, status, (arguments, out, complaints))
        self.assertNotIn("Traceback", complaints)
        return out + complaints

    def backup(self, name: str, *options: str) -> str:
        """Store one file, which replaces the one before, as a run."""
        for path in self.photos.iterdir():
            path.unlink()
        (self.photos / name).write_text(name * 1000)
        os.utime(self.photos / name, (1, 1))
        return self.run_command("-q", "backup", "photos", *options).strip()

    def stored_bytes(self) -> int:
        """Return what all shares take."""
        private = self.home / ".local/share/pipegrid"
        return sum(path.stat().st_size for path in private.glob("**/shares/??/*/*"))

    def test_a_month(self) -> None:
        """Runs are forgotten with reasons, their space is freed, and what is pinned stays."""
        self.backup("first", "--tag", "a tag")
        time.sleep(1.1)
        self.backup("second")
        time.sleep(1.1)
        catalogue = self.backup("third")
        for arguments in (("forget",), ("forget", "photos"), ("forget", "photos@1999")):
            self.run_command(*arguments, status=2)
        runs = [
            json.loads(line) for line in self.run_command("-q", "--json", "backups").splitlines()
        ]
        self.assertEqual([run["tags"] for run in runs], [["a tag"], [], []])
        said = self.run_command("space")
        self.assertIn("backup photos: ", said)
        for run in runs:
            self.assertRegex(said, rf"run {re.escape(run['path'])} \S+ \S+ in no other run\n")
        self.assertIn("reclaimable: 0 B", said)
        self.run_command("pin", runs[1]["path"].removesuffix(":"), "kept")
        rules = ("--keep-last", "1", "--keep-tag", "a tag")
        would = self.run_command("-q", "forget", *rules, "--dry-run")
        self.assertEqual(self.run_command("-q", "forget", *rules), would)
        self.assertRegex(would, r"keep    photos@\S+: \[a tag\]  tag 'a tag'\n")
        self.assertRegex(would, r"forget  photos@\S+:  no rule keeps it\n")
        self.assertRegex(
            would, r"keep    photos@\S+:  the newest; least is left out; one of the last 1\n"
        )
        before = self.stored_bytes()
        said = self.run_command("prune")
        self.assertIn("nothing to release", said)
        self.assertRegex(
            said,
            r"2 objects \(about .* on servers\) that no run has any more stay: an alias, a pin",
        )
        self.assertEqual(self.stored_bytes(), before)
        self.assertIn("kept: URI:DIR2-CHK:", self.run_command("pins"))
        self.run_command("-q", "get", "-r", runs[1]["cap"], "-o", "pinned")
        self.assertEqual((self.home / "pinned/second").read_text(), "second" * 1000)
        self.run_command("unpin", "kept")
        self.assertIn("would release 2 objects", self.run_command("prune", "--dry-run"))
        self.assertEqual(self.stored_bytes(), before)
        self.assertRegex(self.run_command("prune"), "released 2 objects; servers freed ")
        self.assertLess(self.stored_bytes(), before)
        said = self.run_command("-q", "forget", runs[0]["path"])
        self.assertIn(f"forget  {runs[0]['path']} [a tag]  it was named", said)
        self.run_command("prune")
        self.run_command("check", "-r", catalogue)
        self.run_command("-q", "restore", "-o", "back")
        self.assertEqual((self.home / "back/third").read_text(), "third" * 1000)

    def test_without_backups(self) -> None:
        """A sentence, and nothing else."""
        self.run_command("-q", "put", "photos", "-r")
        for command in (("prune",), ("forget", "--keep-last", "1")):
            self.assertIn("no list of backups", self.run_command(*command, status=2))

    def test_killed(self) -> None:
        """At any moment: what is listed can be read, and the next prune frees the rest."""
        chance = random.Random()
        seed = int(os.environ.get("PRUNE_SEED", str(random.SystemRandom().randrange(1 << 30))))
        chance.seed(seed)
        for kill in range(KILLS):
            catalogue = self.backup(f"f{kill}")
            for command in (("forget", "--keep-last", "1"), ("prune",)):
                process = self.start(*command)
                try:
                    process.communicate(timeout=chance.uniform(0.1, 1.5))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
            self.assertIn(
                "healthy", self.run_command("check", "-r", catalogue), f"PRUNE_SEED={seed}"
            )
            time.sleep(1.1)
        self.run_command("-q", "forget", "--keep-last", "1")
        self.run_command("prune")
        self.assertIn("nothing to release", self.run_command("prune"))
        self.run_command("check", "-r", catalogue)
        self.run_command("-q", "restore", "-o", "back")
        last = f"f{KILLS - 1}"
        self.assertEqual((self.home / "back" / last).read_text(), last * 1000)
        shares = {
            path.parent.name
            for path in (self.home / ".local/share/pipegrid").glob("**/shares/??/*/*")
            if path.parent.parent.name != "incoming"
        }
        self.assertEqual(len(shares), 3, f"PRUNE_SEED={seed}: the list, a directory and a file")
