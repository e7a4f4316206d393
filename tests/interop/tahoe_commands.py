"""
The ``tahoe`` command says the same on a PipeGrid gateway as on Tahoe-LAFS's own, with the same status.

Run it with ``make interop``; each command is a process that takes seconds to start.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.interop.processes import TAHOE, Gateway
from tests.interop.test_tahoe_commands import TahoeCommandTestCase, _sorted_json


class SameResultsTests(TahoeCommandTestCase):
    """check, deep-check, manifest and stats, with their options."""

    def test_same_results(self) -> None:
        """Of healthy and damaged trees both commands say the same, with the same status."""
        self.check_healthy_tree()
        self.check_damaged_tree()

    def check_healthy_tree(self) -> None:
        """Nothing has to be repaired."""
        root = self.make_tree()
        for options in (("--verify", "--add-lease"), ("--repair", "--add-lease"), ("-v",)):
            status, out, _ = self.both("deep-check", *options, root)
            self.assertEqual(status, 0)
            self.assertIn("done: 6 objects checked", out)
        self.both("deep-check", "--raw", root)
        for path in (root, f"{root}/lit", f"{root}/sub/mutable"):
            self.both("check", path)
        self.both("check", "--raw", "--verify", "--add-lease", f"{root}/chk")
        for gateway in (self.own, self.ours):
            status, _, err = self.tahoe(gateway, "check", f"{root}/none")
            self.assertEqual(status, 1)
            self.assertIn("No such child: none", err)
        for command in (["manifest"], ["manifest", "--repair-cap"], ["manifest", "--raw"]):
            self.both(*command, root)
        _, out, _ = self.both("stats", root)
        self.assertIn("count-files: 4", out)

    def check_damaged_tree(self) -> None:
        """Each gateway repairs what the other sees then."""
        root = self.make_tree()
        file = self.info(f"{root}/chk")
        for gateway in (self.own, self.ours):
            self.delete_shares(file, 1)
            self.both("deep-check", "-v", root)
            status, out, _ = self.tahoe(gateway, "deep-check", "--repair", "--add-lease", root)
            self.assertEqual(status, 0)
            self.assertIn("1 repairs attempted, 1 successful, 0 failed", out)
            self.both("deep-check", root)


COMMANDS = """
create-alias home
create-alias home
create-alias jalape\u00f1o
list-aliases
list-aliases --readonly-uri
add-alias other nonsense
mkdir
mkdir home:a
mkdir home:a
mkdir --format=MDMF home:m
mkdir --format=CHK home:m2
mkdir home:a/b/c
mkdir nosuch:a
put source/one home:one
put source/one home:one
put source/one
put --mutable - home:sdmf
put --format=MDMF - home:mdmf
put - home:mdmf
put --format=SDMF source/one
put --format=CHK source/sub/two jalape\u00f1o:zwei/dr\u00e9i
put --format=tar source/one
put -
? put source/none home:x
? put source/one home:a
? put source/one home:one/below
get home:one -
? get home:one out
? get home:none -
? get home:a -
? get URI:CHK:nonsense -
ls home:
ls -l home:
ls -F home:
ls --uri home:
ls --readonly-uri home:
? ls --json home:
ls -l --json --uri home:one
ls home:one
ls jalape\u00f1o:
ls nosuch:
? ls home:one/below
ln home:one home:a/ln
? ln home:none home:x
ln home:one home:a
mv home:one home:a/
mv home:a/one home:uno
mv home:uno home:a
? mv home:none home:x
cp -r source home:tree
cp -r -v source home:tree
cp -r --caps-only home:tree caps
cp -v source/one home:tree/three
cp source home:x
cp home:none out2
cp -r home:tree back
cp home:tree/source/one source/sub/two home:a
? unlink home:tree/three
? unlink home:tree/three
rm home:a/ln
? backup -v --exclude=*.tmp source home:bk
backup --exclude=*.tmp source home:bk
backup --exclude-vcs --ignore-timestamps source home:bk
? backup source/one home:bk
ls home:bk/Latest
check home:a/b
check --raw --verify home:tree/source/one
check --repair --add-lease home:mdmf
? check --raw home:sdmf
? check home:none
? deep-check -v --repair --add-lease home:
? deep-check --raw --verify home:
? deep-check home:tree/source/one
? manifest home:
manifest --storage-index home:
manifest --verify-cap home:
manifest --repair-cap home:
? manifest --raw home:
? manifest home:none
? stats home:
? stats --raw home:
? stats home:none
webopen home:tree/source/one
webopen -i home:a
webopen
unlink home:tree
ls home:
"""
"""
One a line; blanks separate arguments. After a question mark only statuses are compared: the words of errors
differ, as do paths of the file system, sizes that depend on times, and which of an object's paths is named.
"""


class SameCommandsTests(TahoeCommandTestCase):
    """Each command has the same status on both gateways, and says the same, but for caps and times."""

    def test_same_commands(self) -> None:
        """All of them, one after the other, in a directory of each gateway's own."""
        for gateway in (self.own, self.ours):
            self.make_source(gateway.directory)
        differences = []
        for line in COMMANDS.strip().splitlines():
            arguments = line.removeprefix("? ").split(" ")
            own, ours = (self.said(gateway, *arguments) for gateway in (self.own, self.ours))
            if own[0] != ours[0] or (own != ours and not line.startswith("? ")):
                differences.append(f"$ tahoe {line}\n  {own}\n  {ours}")
        self.assertEqual(differences, [], "\n".join(differences))

    def make_source(self, home: Path) -> None:
        """Make the files that commands are given."""
        source = home / "source"
        (source / "sub/empty").mkdir(parents=True)
        (source / ".git").mkdir()
        (source / ".git/config").write_text("x" * 60)
        (source / "one").write_bytes(b"one\n")
        (source / "sub/two").write_bytes(b"2" * 5000)
        (source / "skipped.tmp").write_bytes(b"tmp")

    def said(self, gateway: Gateway, *arguments: str) -> tuple[int, list[str], list[str]]:
        """Run a command in the gateway's directory; returns its status and what it said, to be compared."""
        done = subprocess.run(
            [TAHOE, "-d", str(gateway.directory), *arguments],
            cwd=gateway.directory,
            input="from standard input",
            capture_output=True,
            text=True,
            env=os.environ | {"BROWSER": "echo", "LANG": "C.UTF-8"},
            timeout=600,
            check=False,
        )
        return done.returncode, _comparable(done.stdout), _comparable(done.stderr)


_ASIDE = (
    (r"URI:[A-Za-z0-9-]+:[a-z2-7:]{20,}[0-9:]*", lambda m: ":".join(m[0].split(":")[:2])),
    (r"URI%3A[A-Za-z0-9-]+%3A[a-zA-Z0-9%]*", lambda m: m[0].split("%3A")[1]),
    (r"http://[0-9.:]*/", lambda _: "URL/"),
    (r"\b[a-z2-7]{26}\b", lambda _: "SI"),
    (r"(pub-)?v0-[a-z0-9]{52}", lambda _: "SERVER"),
    (r"\b[A-Z][a-z]{2} +[0-9]+ [0-9]{2}:[0-9]{2}", lambda _: "TIME"),
    (r"[0-9]{4}-[0-9-]+[_T ][0-9:.+Z]+", lambda _: "TIME"),
    (r"\b[0-9]+\.[0-9]+\b", lambda _: "SECONDS"),
    (r"0:00:[0-9.]+|[0-9]+ms", lambda _: "SECONDS"),
)


def _comparable(text: str) -> list[str]:
    for pattern, what in _ASIDE:
        text = re.sub(pattern, what, text)
    whole = _sorted_json(text)
    if whole != text:
        return [whole]
    return sorted(_sorted_json(line) for line in text.splitlines())
