"""Trees that we store, read by Tahoe-LAFS's own commands from a grid of its servers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from tests.cli.processes import ProcessTestCase
from tests.interop.processes import TAHOE, TahoeGrid

SHARES = (2, 3, 3)
TIMEOUT_S = 120


def files_below(root: Path) -> dict[str, bytes | None]:
    """Return the bytes of all files below a directory; None for directories."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


class TahoeReadsTreesTests(ProcessTestCase):
    """
    A grid takes its seconds to start, so one test does all with it.

    Each of Tahoe-LAFS's commands takes a second and more to begin, so what a plain ``ls`` or ``get`` would
    ask the gateway for is asked here.
    """

    def setUp(self) -> None:
        super().setUp()
        self.root = Path(self.mktemp()).absolute()
        self.grid = TahoeGrid(self.root, 3)
        self.addCleanup(self.grid.stop)
        self.node = self.root / "gateway"
        self.gateway = self.grid.start_gateway(self.node, SHARES)
        self.addCleanup(self.gateway.stop)
        self.source = self.root / "source"
        random = Random(1)
        for path, size in (
            ("empty", 0),
            ("literal", 55),
            ("\u00e9t\u00e9/small", 1000),
            ("\u00e9t\u00e9/deep/large", 300_000),
        ):
            target = self.source / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(random.randbytes(size))
        (self.source / "nothing").mkdir()
        os.symlink("\u00e9t\u00e9/small", self.source / "link")

    def tahoe(self, *arguments: str) -> str:
        """Run one of its commands."""
        done = subprocess.run(
            [TAHOE, "-d", str(self.node), *arguments],
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        said = (done.stdout + done.stderr).decode("utf-8", "replace")
        self.assertEqual(done.returncode, 0, said[-2000:])
        return done.stdout.decode()

    def names(self, where: str) -> list[str]:
        """Return the names in a directory."""
        return sorted(self.children(where))

    def children(self, where: str) -> dict[str, Any]:
        """Return the children of a directory, as the gateway tells them."""
        children: dict[str, Any] = json.loads(self.ask(where, "?t=json"))[1]["children"]
        return children

    def ask(self, where: str, query: str = "") -> bytes:
        """Ask the gateway for a cap, or a path behind an alias, as its commands take it."""
        if not where.startswith("URI:"):
            alias, _, path = where.partition(":")
            lines = (self.node / "private" / "aliases").read_text().splitlines()
            where = f"{dict(line.split(': ', 1) for line in lines)[alias]}/{path}"
        return self.gateway.request("GET", f"uri/{quote(where)}{query}")

    def ours(self, *arguments: str) -> str:
        """Run one of our commands on the gateway's own directory."""
        return self.run_command("-d", str(self.node), "-q", *arguments)[0]

    def test_trees_copies_and_backups(self) -> None:
        """Each with names and directories of its own."""
        self.trees(self.root / "trees")
        self.tahoe("create-alias", "home")
        self.copies(self.root / "copies")
        self.backups_under_an_alias(self.root / "backups")

    def trees(self, scratch: Path) -> None:
        """``ls``, ``cp -r``, ``manifest`` and ``deep-check`` find what was stored, in a catalogue too."""
        cap = self.ours("put", "-r", str(self.source))
        self.assertEqual(
            [line.split()[-1] for line in self.tahoe("ls", "-l", cap).split("\n")[:-1]],
            ["empty", "link", "literal", "nothing", "\u00e9t\u00e9"],
        )
        found = os.stat(self.source / "literal")
        metadata = self.children(cap)["literal"][1]["metadata"]
        self.assertEqual((metadata["mtime"], metadata["st_mode"]), (found.st_mtime, found.st_mode))
        copy = scratch / "copy"
        copy.mkdir(parents=True)
        self.tahoe("cp", "-r", cap, str(copy))
        for path in ("empty", "literal", "\u00e9t\u00e9/small", "\u00e9t\u00e9/deep/large"):
            self.assertEqual((copy / path).read_bytes(), (self.source / path).read_bytes())
        self.assertEqual(
            (copy / "link").read_bytes(), os.fsencode(os.readlink(self.source / "link"))
        )
        self.assertTrue((copy / "nothing").is_dir())
        lines = self.tahoe("manifest", cap).splitlines()
        self.assertEqual(len(lines), 9)
        self.assertEqual(
            {line.split(" ")[0] for line in lines if line.endswith("/large")}.__len__(), 1
        )
        catalogue = self.ours("backup", str(self.source), "--as", "home")
        self.assertTrue(self.names(catalogue)[0].startswith("home 2"))
        raw = [
            json.loads(line) for line in self.tahoe("deep-check", "--raw", catalogue).splitlines()
        ]
        checks = [
            line["check-results"]["results"]["healthy"] for line in raw if "check-results" in line
        ]
        self.assertEqual(set(checks), {True})
        self.assertEqual(raw[-1]["stats"]["count-files"], 5)
        self.assertEqual(raw[-1]["stats"]["count-directories"], 5)

    def backups_under_an_alias(self, scratch: Path) -> None:
        """Archives and Latest are those of its ``backup``: each goes on with what the other has begun."""
        os.setxattr(self.source / "literal", "user.comment", b"hello")
        with open(self.source / "\u00e9t\u00e9/deep/large", "r+b") as file:
            file.truncate(1_300_000)
        self.ours("backup", str(self.source), "--as", "home:ours")
        ours = self.names("home:ours/Archives")
        self.assertEqual(len(ours), 1)
        self.assertRegex(ours[0], r"^\d{4}-\d\d-\d\d_\d\d:\d\d:\d\dZ$")
        self.assertEqual(self.names("home:ours"), ["Archives", "Latest"])
        copy = scratch / "copy"
        copy.mkdir(parents=True)
        self.tahoe("cp", "-r", "home:ours/Latest", str(copy))
        large = "\u00e9t\u00e9/deep/large"
        self.assertEqual((copy / "Latest" / large).read_bytes(), (self.source / large).read_bytes())
        kept = self.children("home:ours/Latest")["literal"][1]["metadata"]["pipegrid"]["xattrs"]
        self.assertEqual(kept, {"user.comment": "aGVsbG8="})
        self.tahoe("ln", "home:ours/Latest", "home:linked")
        deep = self.children("home:linked/\u00e9t\u00e9/deep")
        self.assertTrue(deep["large"][1]["metadata"]["pipegrid"]["sparse"])
        (self.source / "link").unlink()  # which it would leave out, with status 2
        self.tahoe("backup", str(self.source), "home:ours")
        theirs = self.ours("ls", "home:ours/Archives").split()
        self.assertEqual((len(theirs), theirs[0]), (2, ours[0] + "/"))
        back = scratch / "back"
        self.ours("get", "-r", "home:ours/Latest", "-o", str(back))
        self.assertEqual(files_below(back), files_below(self.source))
        theirs_below, ours_below = (
            {line.split(" ")[0] for line in run("manifest", "home:ours/Latest").splitlines()}
            for run in (self.tahoe, self.ours)
        )
        self.assertEqual(ours_below, theirs_below)
        self.ours("check", "-r", "home:ours/Latest")
        self.ours("backup", str(self.source), "--as", "home:ours", "--keep-last", "1")
        last = self.names("home:ours/Archives")
        self.assertEqual((len(last), last[0]), (2, theirs[1].rstrip("/")))

    def copies(self, scratch: Path) -> None:
        """What ``cp`` links and makes is read by it, and what it has linked by ours."""
        scratch.mkdir()
        self.ours("cp", "-r", str(self.source), "home:new")
        names = ["empty", "link", "literal", "nothing", "\u00e9t\u00e9"]
        self.assertEqual(self.tahoe("ls", "home:new/source").split(), names)
        self.tahoe("cp", str(self.source / "literal"), "home:theirs")
        self.ours("cp", "home:theirs", "home:new/copied")
        self.assertEqual(self.ask("home:new/copied"), (self.source / "literal").read_bytes())
        self.ours("cp", "-r", "home:new", str(scratch / "all"))
        self.assertEqual(
            (scratch / "all/new/source/literal").read_bytes(),
            (self.source / "literal").read_bytes(),
        )
