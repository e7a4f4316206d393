"""
Grid managers next to Tahoe-LAFS: one directory for both programs, and which servers either client uploads to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

from misc.speedtest.peers.nodes import free_port
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.grid import serve_settings
from pipegrid.grid.manager_directory import certificate_for, certificate_text, load_manager
from pipegrid.server import announce
from pipegrid.wire.announcements import make_signing_key
from tests.interop.processes import (
    TAHOE,
    Gateway,
    Process,
    introducer_furl,
    launch_introducer,
    make_node,
    pipegrid,
    run_pipegrid,
    storage_directory,
    until,
    write_introducers,
)

AFRESH = os.environ.get("TAHOE_AFRESH", TAHOE)
SERVER = make_signing_key()


def tahoes(program: str, *arguments: str, data: bytes = b"") -> bytes:
    """Run one of Tahoe-LAFS's programs; returns what it prints."""
    done = subprocess.run(
        [str(Path(AFRESH).with_name(program)), *arguments],
        input=data,
        capture_output=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        timeout=120,
    )
    if done.returncode:
        raise AssertionError(f"{program} {arguments}: {done.stderr.decode()}")
    return done.stdout


def theirs(*arguments: str, data: bytes = b"") -> bytes:
    """Run Tahoe-LAFS's ``grid-manager``."""
    return tahoes("grid-manager", *arguments, data=data)


def ours(*arguments: str, data: bytes = b"") -> bytes:
    """Run ``pipegrid grid-manager``."""
    return pipegrid("grid-manager", *arguments, data=data)


class DirectoryTests(SynchronousTestCase):
    """Each program reads and changes what the other has made."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()

    def test_one_directory(self) -> None:
        """Whichever makes it."""
        for first, second in ((ours, theirs), (theirs, ours)):
            where = ("--config", str(self.root / first.__name__))
            first(*where, "create")
            identities = {each(*where, "public-identity").strip() for each in (first, second)}
            self.assertEqual(len(identities), 1)
            second(*where, "add", "zoë x", SERVER.public_text)
            first(*where, "sign", "zoë x", "3")
            second(*where, "sign", "zoë x", "400")
            first(*where, "add", "bob", SERVER.public_text)
            listed = [each(*where, "list").decode().splitlines() for each in (first, second)]
            heads = [[line.partition(" (")[0] for line in lines] for lines in listed]
            self.assertEqual(heads[0], heads[1])
            self.assertEqual(len(heads[0]), 4)
            self.assertRegex(heads[0][2], r"^       cert 0: valid until 20\d\d-")
            second(*where, "remove", "zoë x")
            self.assertEqual(os.listdir(self.root / first.__name__), ["config.json"])
            first(*where, "remove", "bob")
            self.assertEqual([each(*where, "list") for each in (first, second)], [b"", b""])

    def test_standard_input(self) -> None:
        """Each reads the configuration that the other prints, and prints the same."""
        where = ("--config", "-")
        added = ("add", "b", SERVER.public_text)
        for first, second in ((ours, theirs), (theirs, ours)):
            made = first(*where, "create")
            changed = second(*where, *added, data=made)
            self.assertEqual(json.loads(changed), json.loads(first(*where, *added, data=made)))
            self.assertEqual(changed.strip(), first(*where, *added, data=made).strip())
            first(*where, "sign", "b", "1", data=changed)
            removed = first(*where, "remove", "b", data=changed)
            self.assertEqual(removed.strip(), made.strip())

    def test_certificates_of_one_form(self) -> None:
        """Field for field, and line for line; Tahoe-LAFS's node accepts ours, and we its directory."""
        where = ("--config", str(self.root / "gm"))
        ours(*where, "create")
        ours(*where, "add", "b", SERVER.public_text)
        made = [each(*where, "sign", "b", "9") for each in (ours, theirs)]
        texts = [json.loads(each)["certificate"] for each in made]
        shapes = {json.loads(text)["expires"]: text for text in texts}
        self.assertEqual(len({text.replace(expires, "E") for expires, text in shapes.items()}), 1)
        self.assertEqual({each.count(b"\n") for each in made}, {4})
        node = self.root / "node"
        make_node(node, "[node]\nnickname = n\n[storage]\nenabled = true\n")
        add = ("-d", str(node), "admin", "add-grid-manager-cert", "--name", "m", "--filename", "-")
        tahoes(Path(AFRESH).name, *add, data=made[0])
        files = serve_settings.load(node).settings["certificate_files"]
        self.assertEqual(json.loads(files[0].read_bytes()), json.loads(made[0]))


class DecisionTests(SynchronousTestCase):
    """Seven servers of ours, and clients of both kinds that trust one manager, or two."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir()
        introducer = launch_introducer(self.root / "introducer")
        self.addCleanup(introducer.stop)
        self.furl = introducer_furl(introducer)
        self.servers: dict[str, Process] = {}

    def manager(self, name: str) -> str:
        """Make a manager; returns its directory."""
        directory = str(self.root / name)
        (theirs if name == "one" else ours)("--config", directory, "create")
        return directory

    def start(self, name: str, *managers: tuple[str, float]) -> None:
        """Start a server with certificates of these managers, valid for this number of seconds."""
        directory = self.root / name
        (directory / "private").mkdir(parents=True)
        key = announce.load_or_create(directory, b"t" * 20, has_shares=False).key
        options: list[str] = []
        for number, (manager, left_s) in enumerate(managers):
            path = self.root / f"{name}.{number}"
            where = ("--config", manager)
            if left_s > 86400:
                run = theirs if manager.endswith("one") else ours
                run(*where, "add", name, key.public_text)
                path.write_bytes(run(*where, "sign", name, "30"))
            else:
                expires = datetime.now(timezone.utc) + timedelta(seconds=left_s)
                signed = certificate_for(load_manager(Path(manager)).key, key.public_text, expires)
                path.write_text(certificate_text(signed))
            options += ["--certificate", str(path)]
        process = Process(
            directory,
            *(sys.executable, "-m", "pipegrid.cli", "-d", str(directory), "serve"),
            *("--port", f"tcp:{free_port()}:interface=127.0.0.1", "--nickname", name),
            *("--introducer", self.furl, "--durability", "none", *options),
        )
        self.addCleanup(process.stop)
        self.servers[name] = process

    def client(self, name: str, *managers: str) -> Gateway:
        """Start Tahoe-LAFS's gateway; its directory is PipeGrid's, too."""
        keys = [ours("--config", each, "public-identity").decode().strip() for each in managers]
        directory = self.root / name
        make_node(
            directory,
            f"[node]\nweb.port = tcp:{free_port()}:interface=127.0.0.1\n"
            "tub.port = disabled\ntub.location = disabled\n"
            "[client]\nshares.needed = 1\nshares.happy = 1\nshares.total = 14\n"
            "[storage]\nenabled = false\n[grid_managers]\n"
            + "".join(f"m{number} = {key}\n" for number, key in enumerate(keys)),
        )
        write_introducers(directory, self.furl)
        gateway = Gateway(directory)
        self.addCleanup(gateway.stop)
        gateway.wait(len(self.servers))
        return gateway

    def shares(self) -> dict[str, int]:
        """Return how many shares each server has."""
        return {
            name: sum(1 for each in storage_directory(process).glob("??/*/*") if each.is_file())
            for name, process in self.servers.items()
        }

    def used(self, store: object, *arguments: object) -> set[str]:
        """Store a new file; returns the servers that got shares."""
        before = self.shares()
        assert callable(store)
        store(*arguments)
        return {name for name, count in self.shares().items() if count > before[name]}

    def decided(self, gateway: Gateway) -> set[str]:
        """Return where both programs upload to, which must be the same."""
        data = os.urandom(1000)
        found = self.used(gateway.put, data)
        put = ("-d", str(gateway.directory), "put", "--wait-for", str(len(self.servers)), "-")
        self.assertEqual(self.used(lambda: pipegrid(*put, data=os.urandom(1000))), found)
        return found

    def test_same_decisions(self) -> None:
        """Valid, expired, of an untrusted manager, renewed, two managers, and one that expires meanwhile."""
        one, two, other = map(self.manager, ("one", "two", "other"))
        day_s = 86400.0
        ends_s = time.time() + 45
        self.start("valid", (one, 30 * day_s))
        self.start("second", (two, 30 * day_s))
        self.start("renewed", (one, -day_s), (two, 30 * day_s))
        self.start("expired", (one, -60))
        self.start("wrong", (other, 30 * day_s))
        self.start("none")
        self.start("ends", (one, ends_s - time.time()))
        first, both = self.client("first", one), self.client("both", one, two)
        found = [self.decided(each) for each in (first, both)]
        if time.time() < ends_s:  # else this machine is too slow to see it
            self.assertEqual(found[0], {"valid", "ends"})
            self.assertEqual(found[1], {"valid", "second", "renewed", "ends"})
        until(lambda: time.time() > ends_s + 1, "the expiry")
        self.assertEqual(self.decided(first), {"valid"})
        self.assertEqual(self.decided(both), {"valid", "second", "renewed"})
        status = run_pipegrid(
            *("-d", str(both.directory), "status", "--wait-for", str(len(self.servers)))
        ).stdout.decode()
        lines = {line.split()[0]: line for line in status.splitlines()}
        self.assertRegex(lines["valid"], r"certified by m0 until 20\d\d-\d\d-\d\d$")
        self.assertRegex(lines["renewed"], r"certified by m1 until 20\d\d-\d\d-\d\d$")
        self.assertIn("its certificate of grid manager m0 has expired", lines["ends"])
        for name in ("wrong", "none"):
            self.assertIn("it has no certificate of a configured grid manager", lines[name])
        self.assertIn("expires in", self.servers["ends"].log())
        self.assertIn("expired on", self.servers["expired"].log())
