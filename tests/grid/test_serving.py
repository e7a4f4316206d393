"""A node's directory, and what it says to the server that is run on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.grid import serve_settings
from pipegrid.server.serve import DEFAULT_PORT, ServeSettings
from pipegrid.storage.share_file import Expiry
from tests.grid.introducer_support import FURL
from tests.server.test_server_certificates import certificate

DAY_S = 86400
NODE = """
tub.port = tcp:4711:interface=127.0.0.1
tub.location = tcp:example.org:4711,tor:abc.onion:80
nickname = alice
"""


class ServingTests(SynchronousTestCase):
    """``tahoe.cfg``."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        (self.directory / "private").mkdir(parents=True)

    def load(self, storage: str = "", node: str = NODE, more: str = "") -> ServeSettings:
        """Return the settings that a file gives."""
        text = f"[node]{node}\n[storage]\n{storage}\n{more}\n"
        (self.directory / "tahoe.cfg").write_text(text)
        return serve_settings.load(self.directory).serve_settings(self.directory)

    def refused(self, call: Callable[[], Any]) -> str:
        """Return why something is refused."""
        with self.assertRaises(UsageError) as caught:
            call()
        return str(caught.exception)

    def test_as_made(self) -> None:
        """A storage node as ``tahoe create-node`` makes it: port, location, name and reserved space."""
        settings = self.load(
            "enabled = true\n#readonly =\nreserved_space = 1G\n#storage_dir =\n#expire.enabled ="
        )
        self.assertEqual(
            settings,
            ServeSettings(
                directory=self.directory,
                port="tcp:4711:interface=127.0.0.1",
                location="tcp:example.org:4711,tor:abc.onion:80",
                nickname="alice",
                reserved_bytes=10**9,
            ),
        )

    def test_everything_else(self) -> None:
        """Directory, room, and what is taken."""
        settings = self.load(
            "storage_dir = ../elsewhere\nreadonly = yes\nforce_foolscap = true\nreserved_space ="
        )
        self.assertEqual(settings.storage, self.directory / "../elsewhere")
        self.assertTrue(settings.read_only)
        self.assertFalse(settings.announce_nurls)
        self.assertEqual(settings.reserved_bytes, 0)
        self.assertEqual(self.load("storage_dir = /srv/shares").storage, Path("/srv/shares"))

    def test_home_directories(self) -> None:
        """``~`` is the user's home; of a user whom nobody knows there is none."""
        home = Path(self.mktemp()).absolute()
        home.mkdir()
        self.patch(os, "environ", {"HOME": str(home)})
        self.assertEqual(self.load("storage_dir = ~/shares").storage, home / "shares")
        refused = self.refused(lambda: self.load("storage_dir = ~nobody-has-this-name/shares"))
        self.assertIn("[storage] storage_dir is '~nobody-has-this-name/shares'", refused)
        (home / "cert").write_bytes(certificate())
        section = "[grid_manager_certificates]\nown = ~/cert"
        files = self.load("grid_management = true", more=section).certificate_files
        self.assertEqual(files, (home / "cert",))

    def test_choices_come_first(self) -> None:
        """What a caller chooses counts, what it leaves open does not."""
        self.load("readonly = true")
        found = serve_settings.load(self.directory)
        settings = found.serve_settings(self.directory, port="tcp:1", location=None, read_only=None)
        self.assertEqual(settings.port, "tcp:1")
        self.assertEqual(settings.location, "tcp:example.org:4711,tor:abc.onion:80")
        self.assertTrue(settings.read_only)

    def test_expiry(self) -> None:
        """Leases expire as the operator said, and only then."""
        for text, expected in (
            ("", None),
            ("expire.enabled = false\nexpire.mode = age", None),
            ("expire.enabled = true\nexpire.mode = age", Expiry()),
            (
                "expire.enabled = 1\nexpire.mode = age\nexpire.override_lease_duration = 60 days",
                Expiry(60 * DAY_S),
            ),
            (
                "expire.enabled = on\nexpire.mode = cutoff-date\nexpire.cutoff_date = 2023-11-14",
                Expiry(renewed_since=1699920000),
            ),
            (
                "expire.enabled = true\nexpire.mode = age\nexpire.immutable = false",
                Expiry(immutable=False),
            ),
            (
                "expire.enabled = true\nexpire.mode = age\nexpire.mutable = no",
                Expiry(mutable=False),
            ),
        ):
            self.assertEqual(self.load(text).expiry, expected, text)

    def test_expiry_is_never_guessed(self) -> None:
        """What would remove shares that the operator may want is refused, with the option's name."""
        begin = "expire.enabled = true\nexpire.mode = "
        for text, option in (
            ("expire.enabled = true", "expire.mode"),
            (f"{begin}often", "expire.mode"),
            (f"{begin}cutoff-date", "expire.cutoff_date"),
            (f"{begin}cutoff-date\nexpire.cutoff_date = 14.11.2023", "expire.cutoff_date"),
            (f"{begin}age\nexpire.override_lease_duration = 60", "expire.override_lease_duration"),
            ("expire.enabled = perhaps", "expire.enabled"),
        ):
            self.assertIn(option, self.refused(lambda text=text: self.load(text)))  # type: ignore[misc]

    def test_sizes(self) -> None:
        """As Tahoe-LAFS reads them: G is 10^9, Gi is 2^30, whatever the case."""
        for text, expected in (
            ("0", 0),
            ("123", 123),
            ("100MB", 10**8),
            ("1g", 10**9),
            ("2 GiB", 2 << 30),
            ("3Ti", 3 << 40),
            ("5kB", 5000),
            ("7b", 7),
        ):
            self.assertEqual(serve_settings.parse_size(text), expected, text)
        for text in ("", "G", "1 G 2", "-1", "1.5G", "1X"):
            self.assertRaises(ValueError, serve_settings.parse_size, text)
        self.assertIn("reserved_space", self.refused(lambda: self.load("reserved_space = much")))

    def test_durations(self) -> None:
        """Days, months of 31 days and years of 365."""
        for text, days in (
            ("7days", 7),
            ("31 day", 31),
            ("2mo", 62),
            ("3 Months", 93),
            ("1year", 365),
        ):
            self.assertEqual(serve_settings.parse_duration(text), days * DAY_S, text)
        self.assertEqual(serve_settings.parse_duration("90 seconds"), 90)
        for text in ("", "7", "days", "7 weeks", "-7 days"):
            self.assertRaises(ValueError, serve_settings.parse_duration, text)

    def test_ports_that_tahoe_chose(self) -> None:
        """Of old, and with AUTO, they are in files that the node wrote."""
        furl = "pb://hij2vaxfy3gompizcqnolgf7oegbnsfr@tcp:192.0.2.1:5,tcp:10.0.0.1:5/swissnum"
        (self.directory / "private/storage.furl").write_text(furl + "\n")
        (self.directory / "client.port").write_text("tcp:4712\n")
        for node in (
            "\n",
            "\ntub.location = AUTO\n",
            "\ntub.port =\ntub.location = AUTO,tcp:x:1\n",
        ):
            settings = self.load(node=node)
            self.assertEqual(settings.port, "tcp:4712")
            self.assertEqual(settings.location, "tcp:192.0.2.1:5,tcp:10.0.0.1:5")

    def test_a_node_that_never_ran(self) -> None:
        """What nobody chose yet is chosen as without a configuration."""
        settings = self.load(node="\n")
        self.assertEqual((settings.port, settings.location), (DEFAULT_PORT, None))

    def test_what_cannot_be_served(self) -> None:
        """A node without storage, one that does not listen, and onion services are refused."""
        for storage, node, word in (
            ("enabled = false", NODE, "enabled"),
            ("anonymous = false", NODE, "anonymous"),
            ("", "\ntub.port = disabled\n", "tub.port"),
            ("", "\ntub.port = tcp:1\ntub.location = disabled\n", "tub.location"),
            ("", "\ntub.port = listen:tor\ntub.location = tor:x.onion:1\n", "tub.port"),
            ("", "\ntub.port = tcp:1,listen:i2p\n", "tub.port"),
        ):
            text = self.refused(lambda s=storage, n=node: self.load(s, n))  # type: ignore[misc]
            self.assertIn(word, text)
            self.assertIn("tahoe.cfg", text)

    def test_grid_managers(self) -> None:
        """Their certificates are announced; without them their clients would put nothing there."""
        path = self.directory / "gm.cert"
        path.write_bytes(certificate())
        section = "[grid_manager_certificates]\ndefault = gm.cert"
        settings = self.load("grid_management = true", more=section)
        self.assertEqual(settings.certificate_files, (path,))
        self.assertEqual(self.load("", more=section).certificate_files, ())
        wrong = section.replace("gm.cert", "gone.cert")
        text = self.refused(lambda: self.load("grid_management = true", more=wrong))
        self.assertIn("default", text)
        # Tahoe-LAFS's clients do not use a server at all that announces what they cannot read.
        for data in (b"{}", b'{"certificate": "{}", "signature": "v0-x"}'):
            path.write_bytes(data)
            text = self.refused(lambda: self.load("grid_management = true", more=section))
            self.assertIn("default cannot be followed", text)
            self.assertIn("ask for it again", text)

    def test_plugins(self) -> None:
        """They are left out, and that is said."""
        self.load("plugins = zkapauthorizer")
        (warning,) = serve_settings.load(self.directory).warnings
        self.assertIn("plugins", warning)

    def test_introducers(self) -> None:
        """Those of a Tahoe-LAFS node are found, in both places; a directory of one's own has them, too."""
        path = self.directory / "private/introducers.yaml"
        path.write_text(f"introducers:\n  mine:\n    furl: {FURL}\n")
        found = serve_settings.load(self.directory)
        self.assertEqual((dict(found.introducers), found.is_tahoe), ({"mine": FURL}, False))
        self.load(more=f"[client]\nintroducer.furl = {FURL}")
        found = serve_settings.load(self.directory)
        self.assertEqual(dict(found.introducers), {"mine": FURL, "default": FURL})
        self.assertTrue(found.is_tahoe)

    def test_how_long_unfinished_uploads_are_kept(self) -> None:
        """So long as it says, else seven days; nonsense is refused with its name."""
        path = self.directory / "pipegrid.cfg"
        for text, seconds in (
            ("", 7 * DAY_S),
            ("7 days", 7 * DAY_S),
            ("30min", 1800),
            ("1 Week", 7 * DAY_S),
            ("12h", DAY_S / 2),
            ("60s", 60),
        ):
            path.write_text(f"[storage]\nkeep_unfinished = {text}\n")
            settings = serve_settings.load(self.directory).serve_settings(self.directory)
            self.assertEqual(settings.keep_unfinished_s, seconds, text)
        for text in ("7", "days", "0 days", "59s", "-1 days", "1 fortnight", "1.5h"):
            path.write_text(f"[storage]\nkeep_unfinished = {text}\n")
            refusal = self.refused(lambda: serve_settings.load(self.directory))
            for word in (str(path), "keep_unfinished", repr(text), "7 days"):
                self.assertIn(word, refusal)

    def test_a_directory_of_ones_own(self) -> None:
        """``pipegrid.cfg`` may say the same; without a file nothing is said."""
        self.assertEqual(serve_settings.load(self.directory), serve_settings.ServerDirectory())
        (self.directory / "pipegrid.cfg").write_text(
            "[storage]\nreserved_space = 5MB\nquota = 2TiB\n"
        )
        found = serve_settings.load(self.directory)
        self.assertEqual(found.serve_settings(self.directory).quota_bytes, 2 << 40)
        self.assertEqual(found.serve_settings(self.directory, quota_bytes=0).quota_bytes, 0)
        self.assertEqual(found.serve_settings(self.directory).reserved_bytes, 5_000_000)
        self.assertFalse(found.is_tahoe)
