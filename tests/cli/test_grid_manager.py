"""``pipegrid grid-manager``, as users meet it."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from unittest import mock

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.grid.manager_directory import certificate_for, certificate_text
from pipegrid.transfer.results import ServerStatus
from pipegrid.wire.announcements import make_signing_key, parse_signing_key
from tests.cli.support import BrokenPipe, FakeGrid, Run

SERVER = make_signing_key()


class GridManagerTestCase(SynchronousTestCase):
    """A scratch directory, and a manager's in it."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        self.patch(os, "environ", {**os.environ, "PIPEGRID_DIR": str(self.root / "nowhere")})
        self.gm = self.root / "gm"

    def run_ok(self, *arguments: str, stdin: bytes = b"") -> str:
        """Run a command; returns what it prints."""
        run = Run("grid-manager", *arguments, stdin=stdin)
        self.assertEqual(self.successResultOf(run.finished), 0, run.stderr)
        return run.stdout

    def refused(self, *arguments: str, stdin: bytes = b"", status: int = 2) -> str:
        """Run one that fails; returns its one sentence."""
        run = Run("grid-manager", *arguments, stdin=stdin)
        self.assertEqual(self.successResultOf(run.finished), status, run.stderr)
        self.assertEqual(run.stdout, "")
        self.assertEqual(run.stderr.count("\n"), 1, run.stderr)
        return run.stderr


class ManagerTests(GridManagerTestCase):
    """create, add, sign, list, remove, public-identity."""

    def test_from_nothing(self) -> None:
        """``--config`` before or after the command."""
        where = ("--config", str(self.gm))
        self.assertEqual(self.run_ok(*where, "create"), "")
        identity = self.run_ok("public-identity", "-c", str(self.gm)).strip()
        self.run_ok(*where, "add", "alice", SERVER.public_text)
        signed = json.loads(self.run_ok(*where, "sign", "alice", "30"))
        self.assertEqual(set(signed), {"certificate", "signature"})
        self.assertEqual(json.loads((self.gm / "alice.cert.0").read_text()), signed)
        first, second = self.run_ok("list", *where).splitlines()
        self.assertEqual(first, f"alice: {SERVER.public_text}")
        expires = datetime.fromisoformat(json.loads(signed["certificate"])["expires"])
        self.assertEqual(second, f"       cert 0: valid until {expires} (29 days in the future)")
        with mock.patch.object(time, "time", return_value=time.time() + 33.5 * 86400):
            self.assertIn(f"cert 0: expired {expires} (3 days ago)", self.run_ok(*where, "list"))
        removed = Run("grid-manager", *where, "remove", "alice")
        self.assertEqual(self.successResultOf(removed.finished), 0)
        self.assertIn(
            "the certificates that 'alice' has installed stay valid, the last until", removed.stderr
        )
        self.assertEqual(os.listdir(self.gm), ["config.json"])
        self.assertEqual(self.run_ok(*where, "list"), "")
        self.assertEqual(self.run_ok(*where, "public-identity").strip(), identity)

    def test_standard_input_and_output(self) -> None:
        """With ``-`` nothing is written to a disk."""
        made = self.run_ok("-c", "-", "create")
        added = self.run_ok("-c", "-", "add", "zoë", SERVER.public_text, stdin=made.encode())
        self.assertEqual(
            json.loads(added),
            {**json.loads(made), "storage_servers": {"zoë": {"public_key": SERVER.public_text}}},
        )
        listed = self.run_ok("-c", "-", "list", stdin=added.encode())
        self.assertEqual(listed, f"zoë: {SERVER.public_text}\n")
        signed = json.loads(self.run_ok("-c", "-", "sign", "zoë", "1", stdin=added.encode()))
        self.assertIn(SERVER.public_text, signed["certificate"])
        key = parse_signing_key(json.loads(made)["private_key"])
        identity = self.run_ok("-c", "-", "public-identity", stdin=added.encode())
        self.assertEqual(identity.strip(), key.public_text)
        removed = self.run_ok("-c", "-", "remove", "zoë", stdin=added.encode())
        self.assertEqual(json.loads(removed), json.loads(made))
        self.assertEqual(list(self.root.iterdir()), [])

    def test_refused(self) -> None:
        """One sentence each, and nothing is changed."""
        where = ("-c", str(self.gm))
        self.assertIn("--config DIR", self.refused("list"))
        self.assertIn("the name is empty", self.refused("-c", "", "list"))
        for command in (("list",), ("public-identity",), ("add", "a", "b"), ("sign", "a", "1")):
            said = self.refused(*where, *command)
            self.assertIn("it has no config.json; make one with 'pipegrid grid-manager", said)
        self.assertFalse(self.gm.exists())
        self.run_ok(*where, "create")
        self.run_ok(*where, "add", "a", SERVER.public_text)
        before = (self.gm / "config.json").read_text()
        for arguments, words in (
            (("create",), "exists already"),
            (("add", "a", SERVER.public_text), "exists already"),
            (("add", "a/b", SERVER.public_text), "without slashes"),
            (("add", "b", "pub-v0-b"), "copy it from node.pubkey"),
            (("remove", "b"), "there is no storage server named 'b'"),
            (("sign", "b", "1"), "there is no storage server named 'b'"),
            (("sign", "a", "0"), "0 is not in the range 1<=x<=1825"),
            (("sign", "a", "1826"), "1826 is not in the range"),
            (("sign", "a", "soon"), "'soon' is not a whole number"),
        ):
            self.assertIn(words, self.refused(*where, *arguments))
        self.assertIn("standard input is not JSON", self.refused("-c", "-", "list", stdin=b"x"))
        self.assertEqual((self.gm / "config.json").read_text(), before)
        self.assertEqual(os.listdir(self.gm), ["config.json"])

    def test_a_damaged_certificate(self) -> None:
        """It is listed, with status 1; other commands work."""
        where = ("-c", str(self.gm))
        self.run_ok(*where, "create")
        self.run_ok(*where, "add", "a", SERVER.public_text)
        (self.gm / "a.cert.0").write_text("{")
        self.run_ok(*where, "sign", "a", "3")
        run = Run("grid-manager", *where, "list")
        self.assertEqual(self.successResultOf(run.finished), 1)
        self.assertIn("cert 0: it cannot be used: it is not JSON\n", run.stdout)
        self.assertIn("cert 1: valid until", run.stdout)
        self.run_ok(*where, "remove", "a")
        self.assertEqual(os.listdir(self.gm), ["config.json"])

    def test_a_reader_that_leaves(self) -> None:
        """The certificate is in the directory; ``list`` shows it."""
        where = ("-c", str(self.gm))
        self.run_ok(*where, "create")
        self.run_ok(*where, "add", "a", SERVER.public_text)
        run = Run("grid-manager", *where, "sign", "a", "3", stdout=BrokenPipe())
        self.assertEqual(self.successResultOf(run.finished), 1)
        self.assertIn("cert 0: valid until", self.run_ok(*where, "list"))

    def test_json(self) -> None:
        """One object a line; a certificate and a configuration are what other programs read."""
        where = ("-c", str(self.gm), "--json")
        made = json.loads(self.run_ok(*where, "create"))
        self.assertEqual(json.loads(self.run_ok(*where, "public-identity")), made)
        added = json.loads(self.run_ok(*where, "add", "a", SERVER.public_text))
        self.assertEqual(added, {"name": "a", "public_key": SERVER.public_text})
        signed = json.loads(self.run_ok(*where, "sign", "a", "3"))
        (listed,) = map(json.loads, self.run_ok(*where, "list").splitlines())
        (only,) = listed.pop("certificates")
        self.assertEqual(listed, added)
        self.assertEqual(only["expires"], json.loads(signed["certificate"])["expires"])
        self.assertEqual((only["number"], only["valid"], only["problem"]), (0, True, None))
        self.assertEqual(json.loads(self.run_ok(*where, "remove", "a")), added)
        config = self.run_ok("-c", "-", "--json", "create")
        self.assertEqual(config.count("\n"), 1)
        self.run_ok("-c", "-", "public-identity", stdin=config.encode())


class InstallTests(GridManagerTestCase):
    """``install`` in a server's directory."""

    def setUp(self) -> None:
        super().setUp()
        self.node = self.root / "node"
        self.node.mkdir()
        (self.node / "node.pubkey").write_text(f"{SERVER.public_text}\n")
        expires = datetime.fromtimestamp(time.time() + 30.5 * 86400, timezone.utc)
        signed = certificate_for(make_signing_key(), SERVER.public_text, expires)
        self.text = certificate_text(signed)
        (self.root / "cert").write_text(self.text)

    def test_installed(self) -> None:
        """From a file or standard input, under the manager's name."""
        said = self.run_ok("-d", str(self.node), "install", str(self.root / "cert"))
        self.assertRegex(said, r"^installed; valid until 20\d\d-\d\d-\d\d \d\d:\d\d UTC\n$")
        (self.root / "other.cert").write_text(self.text)
        said = self.run_ok("-d", str(self.node), "install", str(self.root / "other.cert"))
        self.assertRegex(said, r"UTC; installed as other.cert, next to cert.cert\n$")
        self.run_ok(
            *("-d", str(self.node), "install", "-", "--name", "bob"), stdin=self.text.encode()
        )
        files = sorted(os.listdir(self.node / "certificates"))
        self.assertEqual(files, ["bob.cert", "cert.cert", "other.cert"])
        said = self.run_ok("-d", str(self.node), "install", str(self.root / "cert"))
        self.assertRegex(
            said,
            r"UTC; it replaces one valid until 20\d\d-\d\d-\d\d \d\d:\d\d UTC; installed as cert",
        )

    def test_refused(self) -> None:
        """Nothing is written."""
        where = ("-d", str(self.node), "install")
        self.assertIn("No such file", self.refused(*where, str(self.root / "none"), status=1))
        self.assertIn("standard input is not a certificate", self.refused(*where, "-", stdin=b"{}"))
        (self.node / "tahoe.cfg").write_text("")
        said = self.refused(*where, str(self.root / "cert"))
        self.assertIn("use 'tahoe admin add-grid-manager-cert'", said)
        said = self.refused("-d", str(self.root), "install", str(self.root / "cert"))
        self.assertIn("it has no node.pubkey", said)
        self.assertEqual(sorted(os.listdir(self.node)), ["node.pubkey", "tahoe.cfg"])


class CertifiedStatusTests(SynchronousTestCase):
    """``status`` says who is certified until when."""

    def status(self, left_days: float) -> Run:
        """Run ``status`` with a server whose certificate expires in this time."""
        until = datetime.fromtimestamp(time.time() + left_days * 86400, timezone.utc).isoformat()
        found = ServerStatus(
            *("bob", "v0-b", "https", "h:1", True, None, 0.01, "x", 10**9, None, "alice", until)
        )
        self.patch(FakeGrid, "status", lambda _: _fired([found]))
        return Run("status")

    def test_valid_and_near_expiry(self) -> None:
        """The last week before the expiry is reported, too."""
        run = self.status(30.5)
        day = datetime.fromtimestamp(time.time() + 30.5 * 86400, timezone.utc)
        self.assertIn(f"  certified by alice until {day:%Y-%m-%d}\n", run.stdout)
        self.assertNotIn("expires in", run.stderr)
        run = self.status(6.5)
        self.assertIn("  certified by alice until", run.stdout)
        self.assertIn(
            "pipegrid: the certificate of bob by grid manager alice expires in 6 days; without another it "
            "then gets no new shares\n",
            run.stderr,
        )


def _fired(value: object) -> Deferred[object]:
    done: Deferred[object] = Deferred()
    done.callback(value)
    return done
