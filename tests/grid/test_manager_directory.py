"""A grid manager's directory: what is written, what is refused, and what a failure leaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import SinkError, UsageError
from pipegrid.grid import manager_directory
from pipegrid.grid.manager_directory import (
    MAX_CONFIG_BYTES,
    GridManager,
    certificate_for,
    certificate_text,
    changing,
    create_manager,
    issued_certificates,
    load_manager,
    new_manager,
    parse_manager,
    remove_certificates,
    store_certificate,
)
from pipegrid.wire.announcements import make_signing_key
from pipegrid.wire.grid_manager_certificates import (
    certified_by,
    parse_certificate,
    parse_manager_key,
)

SERVER = make_signing_key()
NOW_S = 1_800_000_000.0


def full(*_: object, **__: object) -> None:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class ManagerDirectoryTestCase(SynchronousTestCase):
    """A manager with one server."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.directory = self.root / "gm"
        self.made = new_manager()
        self.made.add("alice", SERVER.public_text)
        create_manager(self.directory, self.made)

    def config(self) -> str:
        """Return the text of the configuration."""
        return (self.directory / "config.json").read_text()


class ConfigurationTests(ManagerDirectoryTestCase):
    """The key and the servers."""

    def test_made_and_read(self) -> None:
        """For its owner alone; missing parents are made."""
        self.assertEqual(self.directory.stat().st_mode & 0o777, 0o700)
        self.assertEqual((self.directory / "config.json").stat().st_mode & 0o777, 0o600)
        found = load_manager(self.directory)
        self.assertEqual((found.key, found.servers), (self.made.key, {"alice": SERVER.public_text}))
        deep = self.root / "a" / "b"
        create_manager(deep, new_manager())
        self.assertEqual(load_manager(deep).servers, {})

    def test_what_exists_is_kept(self) -> None:
        """A key is never replaced."""
        before = self.config()
        with self.assertRaisesRegex(UsageError, "gm exists already; choose another directory"):
            create_manager(self.directory, new_manager())
        self.assertEqual(self.config(), before)

    def test_a_full_disk_leaves_nothing(self) -> None:
        """Neither half a directory, nor a change."""
        with mock.patch.object(manager_directory, "replace_file", full):
            with self.assertRaisesRegex(SinkError, "nothing was changed; free some space"):
                create_manager(self.root / "new", new_manager())
            before = self.config()
            with (
                self.assertRaisesRegex(SinkError, "nothing was changed; free some space"),
                changing(self.directory) as manager,
            ):
                manager.add("bob", SERVER.public_text)
        self.assertEqual([each.name for each in self.root.iterdir()], ["gm"])
        self.assertEqual(self.config(), before)

    def test_two_at_once(self) -> None:
        """The second waits, and gives up with a sentence; without locks there is no waiting."""
        self.patch(manager_directory, "_LOCK_WAIT_S", 0.0)
        fd = os.open(self.directory, os.O_RDONLY)
        self.addCleanup(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with (
            self.assertRaisesRegex(UsageError, "another command is changing .*; try again"),
            changing(self.directory),
        ):
            pass

    def test_unknown_fields_stay(self) -> None:
        """Those of a later version of either program."""
        document = json.loads(self.config())
        document["later"] = [1]
        document["storage_servers"]["alice"]["later"] = 2
        (self.directory / "config.json").write_text(json.dumps(document))
        with changing(self.directory) as manager:
            manager.add("bob", SERVER.public_text)
        found = json.loads(self.config())
        self.assertEqual((found["later"], found["storage_servers"]["alice"]["later"]), ([1], 2))
        self.assertEqual((self.directory / "config.json").stat().st_mode & 0o777, 0o600)

    def test_names(self) -> None:
        """Files are named after them; each of these would leave the directory, or mislead."""
        manager = new_manager()
        for name in ("", "a/b", "../a", "a\0", "a\nb", " a", "x" * 201, "\udcff", "é" * 101):
            with self.assertRaises(UsageError) as caught:
                manager.add(name, SERVER.public_text)
            self.assertNotIn("\n", str(caught.exception))
        for name in ("a b", "zoë", "..", "-x", "x" * 200, "config.json"):
            manager.add(name, SERVER.public_text)
            with self.assertRaisesRegex(UsageError, "exists already"):
                manager.add(name, SERVER.public_text)
        for key in ("", "pub-v0-a", SERVER.server_id, "priv" + SERVER.public_text[3:]):
            with self.assertRaisesRegex(UsageError, "copy it from node.pubkey"):
                manager.add("key", key)

    def test_damaged(self) -> None:
        """One sentence each, without the private key; nothing is changed."""
        secret = str(self.made.key)
        good = json.loads(self.config())
        for text in (
            "",
            "[]",
            "{",
            "[" * 100_000,
            secret,
            json.dumps({**good, "grid_manager_config_version": 1}),
            json.dumps({**good, "grid_manager_config_version": False}),
            json.dumps({**good, "private_key": secret[:-1]}),
            json.dumps({**good, "private_key": 7}),
            json.dumps({**good, "storage_servers": []}),
            json.dumps({**good, "storage_servers": {"a": {}}}),
            json.dumps({**good, "storage_servers": {"a": {"public_key": secret}}}),
        ):
            (self.directory / "config.json").write_text(text)
            with self.assertRaises(UsageError) as caught, changing(self.directory):
                pass
            self.assertIn(str(self.directory), str(caught.exception))
            self.assertNotIn(secret[8:20], str(caught.exception))
            self.assertEqual(self.config(), text)

    def test_too_large(self) -> None:
        """Read no further than the limit, and never written beyond it."""
        (self.directory / "config.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 5))
        with self.assertRaisesRegex(UsageError, "has more than 4194304 bytes"):
            load_manager(self.directory)
        self.assertRaises(
            UsageError, parse_manager, b" " * (MAX_CONFIG_BYTES + 1), "standard input"
        )
        (self.directory / "config.json").write_text(f"{self.made.text}\n")
        self.patch(manager_directory, "MAX_CONFIG_BYTES", len(self.made.text) + 10)
        with (
            self.assertRaisesRegex(UsageError, "would be too large"),
            changing(self.directory) as manager,
        ):
            manager.add("bob", SERVER.public_text)

    def test_no_managers_directory(self) -> None:
        """What is there is not touched."""
        other = self.root / "other"
        other.mkdir()
        (other / "config.json").mkdir()
        for place in (self.root / "nothing", self.root, other):
            with self.assertRaisesRegex(UsageError, str(place)), changing(place):
                pass
        self.assertEqual([each.name for each in other.iterdir()], ["config.json"])
        os.mkfifo(self.root / "config.json")
        with self.assertRaisesRegex(UsageError, "named pipe"):
            load_manager(self.root)


class IssuedTests(ManagerDirectoryTestCase):
    """The certificates."""

    def sign(self, days: int = 30, now_s: float = NOW_S) -> Path:
        """Sign and store one."""
        return store_certificate(self.directory, "alice", self.made.sign("alice", days, now_s))

    def numbers(self) -> list[tuple[int, str]]:
        """Return the certificates, with their problems."""
        found = issued_certificates(self.directory, self.made, "alice")
        return [(each.number, each.problem) for each in found]

    def test_signed(self) -> None:
        """Clients accept it until it expires."""
        data = self.sign(30).read_bytes()
        manager = parse_manager_key("m", self.made.key.public_text)
        found = certified_by(SERVER.server_id, [parse_certificate(data)], [manager])
        assert found is not None
        self.assertEqual(found.expires_s, NOW_S + 30 * 86400)
        text = json.loads(data)["certificate"]
        self.assertEqual(
            text,
            f'{{"expires":"2027-02-14T08:00:00+00:00","public_key":"{SERVER.public_text}","version":1}}',
        )

    def test_numbered(self) -> None:
        """No other one is replaced, whoever makes one at the same time."""
        self.assertEqual(
            [self.sign().name for _ in range(3)], [f"alice.cert.{n}" for n in range(3)]
        )
        self.assertEqual(self.numbers(), [(0, ""), (1, ""), (2, "")])
        with mock.patch.object(os.path, "lexists", return_value=False):  # it appears after the look
            self.assertEqual(self.sign().name, "alice.cert.3")
        self.patch(manager_directory, "MAX_CERTIFICATES_OF_A_SERVER", 4)
        with self.assertRaisesRegex(UsageError, "remove the oldest"):
            self.sign()
        remove_certificates(self.directory, "alice")
        self.assertEqual(os.listdir(self.directory), ["config.json"])

    def test_problems(self) -> None:
        """Each is listed where it is; the others are read."""
        for _ in range(4):
            self.sign()
        paths = [self.directory / f"alice.cert.{number}" for number in range(4)]
        paths[0].write_text("{}")
        other = certificate_for(
            make_signing_key(), SERVER.public_text, datetime.now(timezone.utc) + timedelta(1)
        )
        paths[1].write_text(certificate_text(other))
        moved = certificate_for(
            self.made.key, self.made.key.public_text, datetime.now(timezone.utc) + timedelta(1)
        )
        paths[2].write_text(certificate_text(moved))
        said = [problem for _, problem in self.numbers()]
        self.assertIn("it does not consist of 'certificate' and 'signature'", said[0])
        self.assertEqual(said[1], "this grid manager has not signed it")
        self.assertIn("it is for another public key", said[2])
        self.assertEqual(said[3], "")

    def test_names_of_another_program(self) -> None:
        """That no file can have: they are listed and removed, and nothing outside is read."""
        document = json.loads(self.config())
        for name in ("../gm/alice", "x" * 5000, "\ud800", "a\0"):
            document["storage_servers"] = {name: {"public_key": SERVER.public_text}}
            manager = GridManager(self.made.key, document)
            self.assertEqual(issued_certificates(self.directory, manager, name), [])
            signed = manager.sign(name, 1, NOW_S)
            self.assertRaises(UsageError, store_certificate, self.directory, name, signed)
            remove_certificates(self.directory, name)
            manager.remove(name)
            self.assertEqual(manager.servers, {})

    def test_a_full_disk(self) -> None:
        """No half certificate."""
        with (
            mock.patch.object(manager_directory, "create_file", full),
            self.assertRaisesRegex(SinkError, "nothing was changed; free some space"),
        ):
            self.sign()
        self.assertEqual(self.numbers(), [])

    def test_a_wrong_clock(self) -> None:
        """A certificate that expires at a wrong time is not signed."""
        for now_s in (0.0, 1e12):
            with self.assertRaisesRegex(UsageError, "the clock of this machine shows .*; set it"):
                self.sign(now_s=now_s)
        self.assertEqual(self.numbers(), [])
