"""A Tahoe-LAFS node's directory, used as it stands: everything is taken from it, nothing written in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from foolscap.api import flushEventualQueue
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.core import base32
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import UsageError
from pipegrid.grid import Grid, client_paths
from pipegrid.grid.client_config import load
from pipegrid.grid.client_creation import create_like_tahoe, create_local
from pipegrid.grid.client_paths import is_configured
from pipegrid.grid.introducer_discovery import cache_name
from pipegrid.server.serve import ServeSettings, StorageNode
from pipegrid.tree.backup.backup_state_directory import BackupPlace
from tests.grid.introducer_support import FURL, announced, key, nurl

reactor: Any = installed_reactor

TAHOE_CFG = """\ufeff# -*- mode: conf -*-
[node]
nickname = alice's node
web.port = tcp:3456:interface=127.0.0.1
[client]
introducer.furl = {furl}
shares.needed = 2
shares.happy = 2
shares.total = 4
shares.total = 3
peers.preferred = {first}, v0-other
helper.furl =
[storage]
enabled = true
reserved_space = 1G
expire.mode = 100%
"""


def make_node(directory: Path, **servers: str) -> None:
    """Write what a node's directory holds."""
    private = directory / "private"
    private.mkdir(parents=True)
    text = TAHOE_CFG.format(furl=FURL, first=key(1).server_id)
    (directory / "tahoe.cfg").write_text(text, encoding="utf-8")
    (private / "convergence").write_text(base32.encode(b"c" * 32) + "\n")
    (private / "secret").write_text(base32.encode(b"s" * 32) + "\n")
    (private / "introducers.yaml").write_text(f"introducers:\n  mine:\n    furl: {FURL}\n")
    entries = {
        server_id: {"ann": {"nickname": server_id[-3:], "anonymous-storage-NURLs": [text]}}
        for server_id, text in servers.items()
    }
    (private / "servers.yaml").write_text(json.dumps({"storage": entries}))
    # What the node itself remembers of its introducer.
    cached = {"nickname": "cached", "anonymous-storage-NURLs": [nurl(5)], "service-name": "storage"}
    entry = json.dumps([{"ann": cached, "key_s": key(5).server_id}])
    (private / cache_name("mine")).write_text(entry)


def tree(directory: Path) -> dict[str, Any]:
    """Return all that is in a directory: names, kinds, modes, times of change, contents."""
    return {
        str(path.relative_to(directory)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in [directory, *directory.rglob("*")]
    }


class ReadingTests(SynchronousTestCase):
    """What is taken from it."""

    def setUp(self) -> None:
        self.node = Path(self.mktemp())
        make_node(self.node, x=nurl(1))

    def test_everything_is_taken(self) -> None:
        """Numbers, secrets, introducers, servers, preferences, nickname."""
        self.assertTrue(is_configured(self.node))
        config = load(self.node)
        self.assertEqual((config.params, config.happy), (Params(2, 3), 2))
        self.assertEqual((config.convergence, config.lease_secret), (b"c" * 32, b"s" * 32))
        self.assertEqual([each.name for each in config.introducers.addresses], ["mine", "default"])
        self.assertEqual([each.identity.server_id for each in config.static.servers], ["x"])
        self.assertEqual(config.preferred, {key(1).server_id, "v0-other"})
        self.assertEqual(config.nickname, "alice's node")
        self.assertIsNone(config.local)
        self.assertEqual(config.warnings, ())
        self.assertNotEqual(config.caches[0], self.node / "private")
        self.assertEqual(config.caches[1], self.node / "private")

    def test_foolscap_is_forced_where_the_node_forces_it(self) -> None:
        """``force_foolscap`` is taken as well, and copied; what is neither true nor false is refused."""
        self.assertFalse(load(self.node).force_foolscap)
        config = self.node / "tahoe.cfg"
        text = config.read_text()
        config.write_text(text.replace("[client]", "[client]\nforce_foolscap = True"))
        self.assertTrue(load(self.node).force_foolscap)
        self.assertTrue(create_like_tahoe(Path(self.mktemp()), self.node).force_foolscap)
        config.write_text(text.replace("[client]", "[client]\nforce_foolscap = perhaps"))
        with self.assertRaises(UsageError) as caught:
            load(self.node)
        self.assertIn("[client] force_foolscap must be true or false", str(caught.exception))

    def test_the_format_of_mutable_files(self) -> None:
        """``mutable.format`` is taken in any case, and copied; sdmf if nothing is said."""
        self.assertEqual(load(self.node).mutable_format, "sdmf")
        config = self.node / "tahoe.cfg"
        config.write_text(config.read_text().replace("[client]", "[client]\nmutable.format = MDMF"))
        self.assertEqual(load(self.node).mutable_format, "mdmf")
        own = Path(self.mktemp())
        self.assertEqual(create_like_tahoe(own, self.node).mutable_format, "mdmf")
        self.assertEqual(load(own).mutable_format, "mdmf")

    def test_grid_managers(self) -> None:
        """They are taken with the names that the user gave them, and copied."""
        config = self.node / "tahoe.cfg"
        config.write_text(config.read_text() + f"[grid_managers]\nalice = {key(7).public_text}\n")
        (manager,) = load(self.node).managers
        self.assertEqual((manager.name, str(manager)), ("alice", key(7).public_text))
        own = Path(self.mktemp())
        self.assertEqual(create_like_tahoe(own, self.node).managers, (manager,))
        self.assertIn("[grid_managers]", (own / "pipegrid.cfg").read_text())

    def test_the_size_of_segments(self) -> None:
        """The setting that Tahoe-LAFS has for its own tests decides caps, so it counts here as well."""
        config = self.node / "tahoe.cfg"
        name = "shares._max_immutable_segment_size_for_testing"
        config.write_text(config.read_text().replace("[client]", f"[client]\n{name} = 4096"))
        self.assertEqual(load(self.node).params, Params(2, 3, 4096))
        config.write_text(config.read_text().replace("4096", "4k"))
        with self.assertRaises(UsageError) as caught:
            load(self.node)
        self.assertIn(f"[client] {name} is '4k'", str(caught.exception))

    def test_a_directory_that_was_half_made(self) -> None:
        """Who is cut off wherever can run it again; what says something else is refused, and stays."""
        made = Path(self.mktemp())
        create_like_tahoe(made, self.node)
        steps = ("convergence", "secret", "introducers.yaml", "servers.yaml")
        for name in steps:
            self.assertTrue((made / "private" / name).exists())
        for number in range(len(steps) + 1):
            for last in ("whole", "killed"):
                half = Path(self.mktemp())
                (half / "private").mkdir(parents=True)
                for name in steps[:number]:
                    (half / "private" / name).write_bytes((made / "private" / name).read_bytes())
                    if last == "killed":  # between its two names
                        path = half / "private" / name
                        path.with_name(f".{name}.pipegrid-part").hardlink_to(path)
                create_like_tahoe(half, self.node)
                contents = [
                    {name: entry[2] for name, entry in tree(directory).items() if name != "."}
                    for directory in (made, half)
                ]
                self.assertEqual(*contents)
        other = Path(self.mktemp())
        (other / "private").mkdir(parents=True)
        (other / "private" / "convergence").write_text("another\n")
        with self.assertRaises(UsageError) as caught:
            create_like_tahoe(other, self.node)
        self.assertIn("convergence exists already", str(caught.exception))
        self.assertEqual((other / "private" / "convergence").read_text(), "another\n")

    def test_the_cache_is_elsewhere(self) -> None:
        """In the user's own cache directory, and another one for every node."""
        other = Path(self.mktemp())
        make_node(other)
        with mock.patch.dict("os.environ", {"XDG_CACHE_HOME": "/somewhere/cache"}):
            caches = {load(self.node).caches[0], load(other).caches[0]}
        self.assertEqual({path.parent for path in caches}, {Path("/somewhere/cache/pipegrid")})
        self.assertEqual(len(caches), 2)

    def test_what_must_not_be_lost_is_in_no_cache(self) -> None:
        """The cap that changes the list of backups is among the user's data; that of before is moved."""
        places = {
            "XDG_CACHE_HOME": str(Path(self.mktemp()).absolute()),
            "XDG_DATA_HOME": str(Path(self.mktemp()).absolute()),
        }
        with mock.patch.dict("os.environ", places):
            config = load(self.node)
            assert config.state is not None
            self.assertEqual(config.state.parent, Path(places["XDG_DATA_HOME"], "pipegrid-nodes"))
            old = config.caches[0] / "backup"
            self.assertEqual(BackupPlace(config).directory, config.state / "backup")
            old.mkdir(parents=True)
            (old / "catalogue.cap").write_text("URI:DIR2:...")
            place = BackupPlace(config)
        self.assertEqual(place.directory, config.state / "backup")
        self.assertEqual(place.cap_file.read_text(), "URI:DIR2:...")
        self.assertIsNone(create_local(Path(self.mktemp())).state)

    def test_a_user_without_a_home(self) -> None:
        """Uses the node's directory all the same, and remembers nothing."""
        with (
            mock.patch.dict("os.environ", {"XDG_CACHE_HOME": "", "HOME": ""}),
            mock.patch.object(client_paths, "getpwuid", side_effect=KeyError),
        ):
            self.assertEqual(load(self.node).caches, ())

    def test_one_bad_file_leaves_the_other(self) -> None:
        """YAML that nobody can read is a warning, and everything else is used."""
        (self.node / "private" / "servers.yaml").write_text("storage: [")
        config = load(self.node)
        self.assertEqual(len(config.introducers.addresses), 2)
        (warning,) = config.warnings
        self.assertRegex(
            warning, r"servers.yaml: line [12]: (did not find )?expected (the )?node content"
        )
        (self.node / "private" / "introducers.yaml").write_text("introducers: 7")
        self.assertEqual(len(load(self.node).warnings), 2)

    def test_a_node_that_was_never_started(self) -> None:
        """Its secrets are not there yet, and are not made here."""
        (self.node / "private" / "secret").unlink()
        with self.assertRaises(UsageError) as caught:
            load(self.node)
        self.assertIn("start that Tahoe-LAFS node once", str(caught.exception))

    def test_a_directory_of_ones_own_like_it(self) -> None:
        """``init --tahoe`` copies what matters, and only reads."""
        before, own = tree(self.node), Path(self.mktemp())
        made, theirs = create_like_tahoe(own, self.node), load(self.node)
        self.assertEqual(tree(self.node), before)
        self.assertEqual((made.params, made.happy), (theirs.params, theirs.happy))
        self.assertEqual(made.convergence, theirs.convergence)
        self.assertEqual(made.lease_secret, theirs.lease_secret)
        self.assertEqual(made.introducers, theirs.introducers)
        self.assertEqual(made.static, theirs.static)
        self.assertEqual(made.preferred, theirs.preferred)
        self.assertEqual(made.caches, (own / "private",))
        with self.assertRaises(UsageError) as caught:
            create_like_tahoe(Path(self.mktemp()), own)
        self.assertIn("it has no tahoe.cfg", str(caught.exception))


class UntouchedTests(TestCase):
    """With servers behind it."""

    timeout = 60

    def test_nothing_is_written(self) -> Deferred[None]:
        """After put, get, check, status and an introducer's news, the tree is byte for byte the same."""
        return Deferred.fromCoroutine(self._test_nothing_is_written())

    async def _test_nothing_is_written(self) -> None:
        base = Path(self.mktemp()).absolute()
        nodes = [
            StorageNode(
                reactor,
                ServeSettings(
                    directory=base / f"s{n}", port="tcp:0:interface=127.0.0.1", durability="none"
                ),
            )
            for n in range(3)
        ]
        for node in nodes:
            await node.start()
        directory = base / "node"
        make_node(directory, **{f"server-{n}": node.nurl for n, node in enumerate(nodes)})
        # No connection leaves this machine: both introducers are where nobody listens.
        for name in ("private/introducers.yaml", "tahoe.cfg"):
            path = directory / name
            text = path.read_text("utf-8").replace("intro.example.org:1", "127.0.0.1:1")
            path.write_text(text, "utf-8")
        before = tree(directory)
        with mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(base / "cache")}):
            grid = await Grid.open(reactor, directory)
        assert grid._discovery is not None
        self.assertIn("cached", [peer.name for peer in grid._peers])
        grid._discovery.clients[0]._heard({announced(6)})
        stored = await grid.put(b"y" * 5000, happy=2)
        self.assertEqual(await grid.read(stored.cap), b"y" * 5000)
        await grid.check(stored.cap)
        await grid.status()
        await grid.close()
        await flushEventualQueue()
        for node in nodes:
            await node.stop()
        self.assertEqual(tree(directory), before)
        (written,) = (base / "cache" / "pipegrid").rglob("*.yaml")
        self.assertIn("server-6", written.read_text())
