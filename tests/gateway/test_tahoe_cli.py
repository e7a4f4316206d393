"""The unmodified ``tahoe`` command of Tahoe-LAFS 1.20, which finds our gateway by its ``node.url``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from twisted.trial.unittest import SynchronousTestCase

from tests.gateway.test_webapi_vectors import gateway
from tests.interop.processes import TAHOE

TIMEOUT_S = 120


class TahoeCommandTests(SynchronousTestCase):
    """What it prints, its exit statuses, and what is on the grid then."""

    def setUp(self) -> None:
        self.client = gateway()
        self.home = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(shutil.rmtree, self.home)
        # A node's directory as the command wants one: its own aliases, and the address of the gateway.
        self.node = self.home / "node"
        (self.node / "private").mkdir(parents=True)
        for name in ("node.url", "private/api_auth_token"):
            shutil.copy(self.client / name, self.node / name)
        self.source = self.home / "source"
        (self.source / "sub/empty").mkdir(parents=True)
        (self.source / "one").write_bytes(b"one\n")
        (self.source / "sub/two").write_bytes(os.urandom(100_000))

    def tahoe(self, *arguments: str, status: int = 0, given: bytes = b"") -> str:
        """Run a command; returns what it prints on both streams."""
        done = subprocess.run(
            [TAHOE, "-d", str(self.node), *arguments],
            cwd=self.home,
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HOME": str(self.home), "BROWSER": "echo"},
            timeout=TIMEOUT_S,
            check=False,
        )
        said = done.stdout.decode("utf-8", "replace")
        self.assertEqual(done.returncode, status, said[-2000:])
        self.assertNotIn("Traceback", said)
        return said

    def listing(self, where: str) -> Any:
        """Return what ``ls --json`` prints."""
        return json.loads(self.tahoe("ls", "--json", where))

    def test_files_and_links(self) -> None:
        """Commands: put, get, ls, mkdir, mv, ln, unlink, cp, webopen."""
        self.assertIn("created", self.tahoe("create-alias", "home"))
        self.assertIn("home", self.tahoe("list-aliases"))
        self.assertIn("201 Created", self.tahoe("put", "source/one", "home:one"))
        self.assertIn("200 OK", self.tahoe("put", "source/one", "home:one"))
        self.assertEqual(self.tahoe("get", "home:one", "-"), "one\n")
        self.assertIn("404 Not Found", self.tahoe("get", "home:nothing", "new", status=1))
        self.assertFalse((self.home / "new").exists())
        self.assertIn("No such file", self.tahoe("ls", "home:nothing", status=2))
        self.assertIn("URI:DIR2:", self.tahoe("mkdir", "home:a/b"))
        self.tahoe("mv", "home:one", "home:a/uno")
        self.tahoe("ln", "home:a/uno", "home:a/b/link")
        self.assertIn("200 OK", self.tahoe("unlink", "home:a/uno"))
        self.assertEqual(self.tahoe("get", "home:a/b/link", "-"), "one\n")
        self.tahoe("mv", "home:a", "home:z")
        self.assertIn("can't overwrite", self.tahoe("ln", "home:z/b/link", "home:z", status=1))
        self.assertEqual(self.tahoe("ls", "home:").split(), ["z"])
        url = (self.node / "node.url").read_text().strip()
        cap = self.listing("home:z/b/link")[1]["ro_uri"]
        for page in (f"{url}uri/{cap}", f"{url}uri/{cap}?t=info", url):
            with urlopen(page) as answer:
                self.assertEqual(answer.status, 200)

    def test_trees(self) -> None:
        """``cp -r`` there and back, twice; ``backup``, of which the second run sends nothing."""
        self.tahoe("create-alias", "home")
        for _ in range(2):
            self.tahoe("cp", "-r", "source", "home:copy")
        self.tahoe("cp", "-r", "home:copy", "back")
        same = subprocess.run(["diff", "-r", "source", "back/copy/source"], cwd=self.home)
        self.assertEqual(same.returncode, 0)
        self.tahoe("cp", "-r", "home:copy/source", "home:second")
        self.assertEqual(self.tahoe("ls", "home:second/source").split(), ["one", "sub"])
        self.assertIn("2 files uploaded (0 reused)", self.tahoe("backup", "source", "home:b"))
        again = self.tahoe("backup", "source", "home:b")
        self.assertIn("0 files uploaded (2 reused)", again)
        self.assertIn("0 directories created (3 reused)", again)
        self.assertEqual(self.tahoe("ls", "home:b/Latest/sub").split(), ["empty", "two"])
        self.assertEqual(self.listing("home:b/Latest")[1]["mutable"], False)

    def test_mutable_files(self) -> None:
        """Of both formats, changed in place."""
        self.tahoe("create-alias", "home")
        for name, options in (("sdmf", ["--mutable"]), ("mdmf", ["--format=MDMF"])):
            self.tahoe("put", *options, "source/one", f"home:{name}")
            cap = self.listing(f"home:{name}")[1]["rw_uri"]
            self.assertIn("200 OK", self.tahoe("put", "-", f"home:{name}", given=b"changed"))
            kind, found = self.listing(f"home:{name}")
            self.assertEqual((kind, found["rw_uri"], found["size"]), ("filenode", cap, 7))
            self.assertEqual(found["format"], name.upper())
            self.assertIn(
                "replace or update requested with read-only cap",
                self.tahoe("put", "source/one", found["ro_uri"], status=1),
            )
