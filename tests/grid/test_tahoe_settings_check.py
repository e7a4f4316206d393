"""Every setting of Tahoe-LAFS: followed, refused, or not used; none is ignored in silence."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from misc import settings_page
from twisted.internet import reactor as installed_reactor
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from pipegrid.cli.startup.preconnect_servers import dial
from pipegrid.core import base32
from pipegrid.errors import UsageError
from pipegrid.grid import client_config, serve_settings
from pipegrid.grid.client_creation import create_like_tahoe
from pipegrid.grid.server_opening import ConnectionOptions, Windows, open_server
from pipegrid.grid.strict_config import RefusedSetting
from pipegrid.grid.tahoe_settings_check import MAX_MANAGERS, SETTINGS, checked_config, section_of
from pipegrid.reactor.connection_policy import DirectWay, ProxyWay, RefusedWay

reactor: Any = installed_reactor

LIST = Path(__file__).with_name("tahoe_settings_1_20.txt")
TAHOE_PYTHON = Path(__file__).parents[2] / ".venv-tahoe/bin/python"
KEY = "pub-v0-" + "a" * 52
NURL = f"pb://{'A' * 43}@127.0.0.1:9/swissnum#v=1"

REFUSED = (
    ("node", "reveal-IP-address", "false"),
    ("node", "reveal-ip-address", "no"),
    ("node", "reveal-IP-address", "perhaps"),
    ("connections", "tcp", "i2p"),
    ("connections", "tcp", "socks"),
    ("connections", "tcp", ""),
    ("tor", "enabled", "perhaps"),
    ("tor", "launch", "perhaps"),
    ("tor", "socks.port", "tcp:tor.example:9050"),
    ("tor", "control.port", "tcp:127.0.0.1"),
    ("i2p", "enabled", "true"),
    ("i2p", "launch", "true"),
    ("i2p", "dest", "true"),
    ("i2p", "sam.port", "tcp:127.0.0.1:7656"),
    ("i2p", "i2p.configdir", "/etc/i2p"),
    ("client", "helper.furl", f"pb://{'a' * 32}@tcp:127.0.0.1:9/helper"),
    ("client", "storage.plugins", "zkapauthorizer"),
    ("client", "mutable.format", "XDMF"),
    ("grid_managers", "alice", "pub-v0-short"),
)
"""Section, name, and a value that is refused."""

OF_SERVERS = (
    ("storage", "enabled"),
    ("storage", "anonymous"),
    ("storage", "debug_discard"),
)

PASSING = (
    "[node]\nreveal-IP-address = true\n[connections]\ntcp = tcp\n",
    "[connections]\ntcp = TCP\n",
    "[tor]\nenabled = false\nsocks.port = tcp:127.0.0.1:9050\nlaunch = false\nonion = no\n",
    "[connections]\ntcp = Tor\n[tor]\nsocks.port = unix:/run/tor/socks\n[node]\nreveal-IP-address = no\n",
    "[connections]\ntcp = Disabled\n[tor]\ncontrol.port = tcp:127.0.0.1:9051\n",
    "[tor]\nenabled = true\nsocks.port =\n",
    "[i2p]\nenabled = false\nsam.port = tcp:127.0.0.1:7656\ndest = false\n",
    "[client]\nhelper.furl = None\nstorage.plugins =\nmutable.format = mdmf\n",
    "[storageclient.plugins.example]\nwhatever = 1\n[storageserver.plugins.example]\nx = 2\n",
    "[sftpd]\nenabled = true\n[helper]\nenabled = true\n[magic_folder]\nenabled = false\n",
    f"[grid_managers]\nalice = {KEY}\n",
    "",
)


def listed() -> list[tuple[str, str]]:
    """Return what Tahoe-LAFS accepts, as it was written down: section and name."""
    lines = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return [(section, name) for section, _, name in (line.partition(" ") for line in lines)]


def make_node(directory: Path, text: str, servers: str = "") -> Path:
    """Write a node's directory with such a ``tahoe.cfg``."""
    (directory / "private").mkdir(parents=True, exist_ok=True)
    (directory / "tahoe.cfg").write_text(text)
    for name in ("convergence", "secret"):
        (directory / "private" / name).write_text(base32.encode(b"s" * 32) + "\n")
    if servers:
        (directory / "private" / "servers.yaml").write_text(servers)
    return directory


def entry(connections: str = "", nurl: str = NURL, more: str = "") -> str:
    """Return a ``servers.yaml`` of one server."""
    ways = f"\n    connections: {connections}" if connections else ""
    ann = f"{{anonymous-storage-NURLs: ['{nurl}']}}"
    return f"storage:\n  alice:\n    ann: {ann}{ways}{more}\n"


class TableTests(SynchronousTestCase):
    """The table against the list of what Tahoe-LAFS knows, and against the page."""

    def test_all_that_tahoe_knows(self) -> None:
        """Each setting of the list has a row, and each refusal a value in these tests."""
        self.assertEqual(len(listed()), 64)
        for section, name in listed():
            known = section_of(section)
            assert known is not None, section
            self.assertIn(name.lower(), known, section)
        tried = {(section, name.lower()) for section, name, _ in REFUSED} | set(OF_SERVERS)
        refused = {
            (each.section, each.name.lower())
            for each in SETTINGS
            if "refused" in (each.client, each.server)
        }
        self.assertLessEqual(refused, tried)

    def test_the_list_is_that_of_tahoe(self) -> None:
        """Asked again, where Tahoe-LAFS is installed, in its own process."""
        if not TAHOE_PYTHON.exists():
            raise SkipTest("Tahoe-LAFS is not installed")
        head = LIST.read_text().splitlines()[4:7]
        program = "\n".join(line.removeprefix("#").strip() for line in head)
        done = subprocess.run(
            [str(TAHOE_PYTHON), "-c", program], capture_output=True, text=True, check=True
        )
        static = [f"{section} {name}" for section, name in listed() if name != "*"]
        self.assertEqual(done.stdout.split("\n"), [*static, ""])

    def test_the_page(self) -> None:
        """It has the table as it is; ``python -m misc.settings_page`` writes it."""
        text = settings_page.PAGE.read_text("utf-8")
        self.assertEqual(settings_page.page_with_tables(text), text)


class RefusalTests(SynchronousTestCase):
    """What cannot be followed is refused wherever a directory is read."""

    def test_refused(self) -> None:
        """By commands, by ``init --tahoe``, and by who connects in advance; the sentence names it."""
        for section, name, value in REFUSED:
            text = f"[client]\nshares.happy = 1\n[{section}]\n{name} = {value}\n"
            if section == "client":
                text = f"[client]\n{name} = {value}\n"
            node = make_node(Path(self.mktemp()), text, entry())
            for read in (client_config.load, lambda at: create_like_tahoe(Path(self.mktemp()), at)):
                with self.assertRaises(RefusedSetting, msg=(name, value)) as caught:
                    read(node)
                said = str(caught.exception)
                self.assertRegex(said, rf"tahoe.cfg:[24]: \[{section}\] (?i:{name}) is ")
                self.assertIn("nothing was sent", said)
            self.assertIsNone(dial(node))
            if section in ("node", "connections", "tor", "i2p"):
                client_config.load(node, offline=True)  # as ``encode`` does

    def test_refused_by_serve(self) -> None:
        """What is about connections is refused there, too; what is about uploads is not."""
        for section, name, value in REFUSED:
            node = make_node(Path(self.mktemp()), f"[{section}]\n{name} = {value}\n")
            known = section_of(section)
            assert known is not None
            setting = known.get(name.lower()) or known["*"]
            if setting.server != "not used":
                self.assertRaises(RefusedSetting, serve_settings.load, node)
            else:
                serve_settings.load(node)
        for section, name, value in (
            ("storage", "enabled", "false"),
            ("storage", "anonymous", "false"),
            ("storage", "debug_discard", "true"),
            ("tor", "onion", "true"),
        ):
            node = make_node(Path(self.mktemp()), f"[{section}]\n{name} = {value}\n")
            self.assertRaises(UsageError, serve_settings.load, node)
            client_config.load(node)

    def test_passing(self) -> None:
        """The same settings with values that ask for nothing else than what is done."""
        for text in PASSING:
            client_config.load(make_node(Path(self.mktemp()), text))

    def test_unknown(self) -> None:
        """Slips are refused, with what was meant."""
        for text, hint in (
            ("[node]\nreveal-IP-adress = false\n", "did you mean reveal-IP-address?"),
            ("[connection]\ntcp = tor\n", "did you mean connections?"),
            ("[Connections]\ntcp = tor\n", "did you mean connections?"),
            ("[grid_manager]\nalice = x\n", "did you mean grid_managers?"),
            (
                "[DEFAULT]\nreveal-ip-address = false\n[client]\n",
                "not a setting that Tahoe-LAFS knows",
            ),
            ("[x]\n", "Tahoe-LAFS knows no section [x]"),
        ):
            node = make_node(Path(self.mktemp()), text, entry())
            with self.assertRaises(RefusedSetting, msg=text) as caught:
                client_config.load(node)
            self.assertIn(hint, str(caught.exception))
            self.assertIsNone(dial(node))

    def test_many_managers(self) -> None:
        """Their number is bounded."""
        keys = "".join(f"m{number} = {KEY}\n" for number in range(MAX_MANAGERS + 1))
        node = make_node(Path(self.mktemp()), f"[grid_managers]\n{keys}")
        self.assertRaises(RefusedSetting, checked_config, node, "client")

    def test_the_blacklist(self) -> None:
        """Files that a node gives to nobody are not given here, either."""
        node = make_node(Path(self.mktemp()), "")
        (node / "access.blacklist").write_text("# none yet\n\n")
        client_config.load(node)
        (node / "access.blacklist").write_text("# one\nabcdef illegal\n")
        with self.assertRaises(RefusedSetting) as caught:
            client_config.load(node)
        self.assertIn("access.blacklist forbids access to files", str(caught.exception))


class ServersTests(SynchronousTestCase):
    """Other ways to one server."""

    def load(self, servers: str) -> client_config.GridConfig:
        """Return what a directory with such servers says."""
        return client_config.load(make_node(Path(self.mktemp()), "", servers))

    def test_refused(self) -> None:
        """A server that is to be reached otherwise is not reached at all, announced or not."""
        for ways in (
            "{tcp: null}",
            "{tor: disabled}",
            "{tcp: socks}",
            "{tor: tcp}",
            "tor",
            "[tcp]",
            "{tcp: tcp, 7: tcp}",
        ):
            for nurl in (NURL, "no NURL"):
                with self.assertRaises(RefusedSetting, msg=ways) as caught:
                    self.load(entry(ways, nurl))
                self.assertIn("server 'alice': its 'connections' are", str(caught.exception))
        for text in (
            "storage:\n  alice:\n    conections: {tcp: tor}\n",
            "storage:\n  alice: {connections: {tcp: tor}, ann: {\n",
        ):
            self.assertRaises(RefusedSetting, self.load, text)
        for settings, ways in (
            ("[node]\nreveal-IP-address = false\n[connections]\ntcp = tor\n", "{tcp: tcp}"),
            ("[tor]\nenabled = false\n", "{tcp: tor}"),
        ):
            for nurl in (NURL, "no NURL"):  # its server may be announced
                node = make_node(Path(self.mktemp()), settings, entry(ways, nurl))
                with self.assertRaises(RefusedSetting) as caught:
                    client_config.load(node)
                self.assertIn(
                    "server 'alice': its 'connections' are 'tcp: t", str(caught.exception)
                )

    def test_passing(self) -> None:
        """What asks for nothing else passes; other names are reported."""
        for ways in ("", "{}", "{tcp: tcp}", "{tcp: tcp, tor: tor, i2p: i2p}"):
            self.assertEqual(self.load(entry(ways)).warnings, ())
            self.assertIsInstance(self.load(entry(ways)).connections_to("alice").tcp, DirectWay)
        for way, kind in (("tor", ProxyWay), ("disabled", RefusedWay)):
            for nurl in (NURL, "no NURL"):  # its server may be announced
                found = self.load(entry(f"{{tcp: {way}}}", nurl))
                self.assertIsInstance(found.connections_to("alice").tcp, kind)
                self.assertIsInstance(found.connections_to("bob").tcp, DirectWay)
        (warning,) = self.load(entry(more="\n    comment: hers")).warnings
        self.assertIn("server 'alice': 'comment' is not read", warning)

    def test_nobody_connects_in_advance(self) -> None:
        """Where a file may say how to reach a server, however that is written; or where a proxy is used."""
        for settings in (
            "[connections]\ntcp = tor\n",
            "[connections]\ntcp = disabled\n",
            "[node]\nreveal-IP-address = false\n[connections]\ntcp = tor\n",
        ):
            node = make_node(Path(self.mktemp()), settings, entry())
            client_config.load(node)
            self.assertIsNone(dial(node))
        for text in (
            entry("{tcp: tor}"),
            entry("{tcp: tcp}"),
            entry(more='\n    "conn\\x65ctions": {tcp: tor}'),
        ):
            self.assertIsNone(dial(make_node(Path(self.mktemp()), "", text)))

    def test_names_of_other_networks(self) -> None:
        """No name server is asked for a name of Tor's or I2P's, whatever the scheme says."""
        onion = NURL.replace("127.0.0.1", "abc.ONION")
        hints = ("tor:abc.onion:80", "tcp:abc.onion:80", "i2p:abc.i2p", "tcp:abc.i2p.:1")
        windows = Windows(1 << 20, 1 << 20)
        for address in (
            f"anonymous-storage-NURLs: ['{onion}']",
            *(f"anonymous-storage-FURL: 'pb://{'a' * 32}@{hint}/x'" for hint in hints),
        ):
            text = f"storage:\n  bob:\n    ann: {{{address}}}\n"
            node = make_node(Path(self.mktemp()), "[tor]\nenabled = false\n", text)
            found = client_config.load(node)
            if "i2p:" in address:
                self.assertEqual((found.static.servers, len(found.warnings)), ((), 1))
                continue
            (bob,) = found.static.servers
            why = "I2P is not supported" if "i2p" in address else "[tor] enabled is false"
            with self.assertRaises(ValueError) as caught:
                open_server(reactor, bob, windows, ConnectionOptions(found.connections_to("bob")))
            self.assertIn(why, str(caught.exception))

    def test_introducers_of_other_networks(self) -> None:
        """They are left out, with a warning, and other settings of one are reported."""
        node = make_node(Path(self.mktemp()), "")
        tor = f"pb://{'a' * 32}@i2p:abc.i2p/x"
        (node / "private" / "introducers.yaml").write_text(
            f"introducers:\n  far: {{furl: '{tor}'}}\n"
            f"  near: {{furl: '{tor.replace('i2p:abc.i2p', 'tcp:127.0.0.1:80')}', tor: 1}}\n"
        )
        found = client_config.load(node).introducers
        self.assertEqual([each.name for each in found.addresses], ["near"])
        far, near = found.warnings
        self.assertIn("introducer 'far' is skipped: its fURL has no address for TCP or Tor", far)
        self.assertIn("introducer 'near': 'tor' is not read", near)
