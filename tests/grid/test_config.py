"""A client's directory: making one, and reading what it says."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.core.encoding_parameters import DEFAULT_SEGMENT_BYTES, Params
from pipegrid.errors import UsageError
from pipegrid.grid import client_config, client_paths
from pipegrid.grid.client_config import load
from pipegrid.grid.client_creation import create_local
from pipegrid.grid.client_paths import default_directory, is_configured
from pipegrid.grid.local_grid import open_local


class ConfigTestCase(SynchronousTestCase):
    """A directory, and what a refusal looks like."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())

    def assert_refused(self, call: Callable[[], object], *words: object) -> None:
        """The call is refused in one sentence with these words."""
        with self.assertRaises(UsageError) as caught:
            call()
        text = str(caught.exception)
        for word in words:
            self.assertIn(str(word), text)
        self.assertNotIn("\n", text)


class SecretTests(ConfigTestCase):
    """What secrets may be, and who may put others into their place."""

    def test_a_lax_umask(self) -> None:
        """Lets nobody else change the directory, in which they could put a 'private' of theirs."""
        before = os.umask(0)
        try:
            create_local(self.directory / "client")
        finally:
            os.umask(before)
        for path in (self.directory, self.directory / "client"):
            self.assertEqual(path.stat().st_mode & 0o022, 0, path)

    def test_empty(self) -> None:
        """As a full disk leaves it: whoever has a file could tell that it is stored."""
        create_local(self.directory)
        for name in ("convergence", "secret"):
            path = self.directory / "private" / name
            before = path.read_bytes()
            for text in (b"", b"\n"):
                path.write_bytes(text)
                self.assert_refused(lambda: load(self.directory), path, "is empty", "restore it")
            path.write_bytes(before)
        load(self.directory)


class CreateTests(ConfigTestCase):
    """``create_local``."""

    def test_defaults(self) -> None:
        """Ten servers, 3 of 10 shares, 7 happy; what is returned is what is read again."""
        made = create_local(self.directory)
        self.assertEqual(load(str(self.directory)), made)
        self.assertEqual((made.params, made.happy), (Params(), 7))
        assert made.local is not None
        self.assertEqual(made.local.directory, self.directory / "storage")
        self.assertEqual((made.local.servers, made.local.durability), (10, "batch"))
        self.assertEqual(len(made.lease_secret), 32)
        self.assertEqual(len(made.convergence), 32)
        self.assertTrue(is_configured(self.directory))

    def test_other_settings(self) -> None:
        """All that is asked for is remembered."""
        made = create_local(
            self.directory, servers=4, params=Params(2, 5, 1000), happy=3, durability="strict"
        )
        self.assertEqual((made.params, made.happy), (Params(2, 5, 1000), 3))
        assert made.local is not None
        self.assertEqual((made.local.servers, made.local.durability), (4, "strict"))

    def test_happy_by_default(self) -> None:
        """Seven, or what servers and shares allow."""
        for servers, shares, happy in ((10, 10, 7), (3, 10, 3), (10, 5, 5), (1, 1, 1)):
            made = create_local(
                self.directory / f"{servers}-{shares}",
                servers=servers,
                params=Params(1, shares),
            )
            self.assertEqual(made.happy, happy)

    def test_secrets_are_private_and_kept(self) -> None:
        """Nobody else may read them; those that are there decide what converges, and stay."""
        private = self.directory / "private"
        private.mkdir(parents=True)
        (private / "convergence").write_text(base32.encode(b"c" * 32) + "\n")
        made = create_local(self.directory)
        self.assertEqual(made.convergence, b"c" * 32)
        self.assertEqual(stat.S_IMODE(os.stat(private / "secret").st_mode), 0o600)
        self.assertEqual(sorted(os.listdir(private)), ["convergence", "secret"])

    def test_impossible_numbers(self) -> None:
        """Each is refused before anything is made."""
        for call, words in (
            (lambda: create_local(self.directory, servers=0), ["1 to 1000", "not 0"]),
            (lambda: create_local(self.directory, servers=1001), ["1001"]),
            (lambda: create_local(self.directory, happy=11), ["11 servers", "1 to 10"]),
            (lambda: create_local(self.directory, happy=0), ["0 servers"]),
            (lambda: create_local(self.directory, servers=3, happy=4), ["less with happy"]),
            (lambda: create_local(self.directory, durability="some"), ["strict", "'some'"]),
        ):
            self.assert_refused(call, *words)
            self.assertFalse(self.directory.exists())

    def test_a_directory_that_is_configured(self) -> None:
        """It is left as it is."""
        made = create_local(self.directory)
        self.assert_refused(lambda: create_local(self.directory, servers=3), "configured already")
        self.assertEqual(load(self.directory), made)

    def test_a_place_that_cannot_be_written(self) -> None:
        """The reason is told."""
        self.directory.write_text("a file")
        self.assert_refused(
            lambda: create_local(self.directory), self.directory, "choose another directory"
        )

    def test_two_at_the_same_time(self) -> None:
        """Whoever comes second uses what the first one made: no secret is ever replaced."""
        link = os.link
        others: list[client_config.GridConfig] = []

        def overtaken(source: str, target: Path) -> None:
            if not others:
                self.patch(os, "link", link)
                others.append(create_local(self.directory, servers=5))
            link(source, target)

        self.patch(os, "link", overtaken)
        self.assertEqual([create_local(self.directory, servers=4)], others)
        names = sorted(os.listdir(self.directory) + os.listdir(self.directory / "private"))
        self.assertEqual(names, ["convergence", "pipegrid.cfg", "private", "secret"])


class LoadTests(ConfigTestCase):
    """``load`` and its complaints."""

    def setUp(self) -> None:
        super().setUp()
        create_local(self.directory)
        self.path = self.directory / "pipegrid.cfg"

    def load(self, text: str) -> client_config.GridConfig:
        self.path.write_text(text)
        return load(self.directory)

    def test_defaults(self) -> None:
        """What is not said is as everywhere."""
        loaded = self.load("")
        self.assertEqual((loaded.params, loaded.happy, loaded.local), (Params(), 7, None))
        self.assertEqual(loaded.params.max_segment_bytes, DEFAULT_SEGMENT_BYTES)
        local = self.load("[local]\n").local
        assert local is not None
        self.assertEqual((local.servers, local.durability), (10, "batch"))
        self.assertIsNone(local.keep_unfinished_s)
        self.assertEqual(self.load("[client]\nshares.total = 5\n").happy, 5)

    def test_how_long_unfinished_uploads_are_kept(self) -> None:
        """An embedded grid's servers keep them as long as it says."""
        local = self.load("[local]\nservers = 1\nkeep_unfinished = 2 hours\n").local
        assert local is not None
        reactor: Any = MemoryReactorClock()
        for grid, seconds in (
            (local, 7200.0),
            (local._replace(keep_unfinished_s=None), 604800.0),
        ):
            (store,) = open_local(reactor, grid).stores
            self.assertEqual(store.keep_unfinished_s, seconds)

    def test_storage_is_made_private(self) -> None:
        """Of an earlier version, or made by hand: nobody else shall read the secrets of mutable shares."""
        self.addCleanup(os.umask, os.umask(0))
        directory = Path(self.mktemp())
        local = create_local(directory, servers=1).local
        assert local is not None
        storage = directory / "storage"
        reactor: Any = MemoryReactorClock()
        self.assertEqual(open_local(reactor, local).warnings, ())  # there is none yet
        storage.mkdir(0o777)
        self.assertEqual(open_local(reactor, local).warnings, ())
        self.assertEqual(stat.S_IMODE(storage.stat().st_mode), 0o700)

    def test_storage_that_cannot_be_made_private(self) -> None:
        """It is reported, and so is one elsewhere, unless it is for a group alone."""
        self.addCleanup(os.umask, os.umask(0))
        local = create_local(Path(self.mktemp()), servers=1).local
        assert local is not None
        reactor: Any = MemoryReactorClock()
        local.directory.mkdir(0o755)

        def refused(*_: object) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        self.patch(os, "chmod", refused)
        (warning,) = open_local(reactor, local).warnings
        self.assertIn("Operation not permitted", warning)
        for mode, count in ((0o755, 1), (0o770, 0)):
            elsewhere = Path(self.mktemp())
            elsewhere.mkdir(mode)
            warnings = open_local(reactor, local._replace(directory=elsewhere)).warnings
            self.assertEqual(len(warnings), count)

    def test_an_absolute_directory(self) -> None:
        """The storage may be elsewhere."""
        local = self.load("[local]\ndirectory = /srv/storage\n").local
        assert local is not None
        self.assertEqual(local.directory, Path("/srv/storage"))

    def test_asking_first(self) -> None:
        """The choices are named; a Tahoe-LAFS node's directory has no settings of ours."""
        self.assertEqual(self.load("").ask_first, "auto")
        for name in ("auto", "always", "never"):
            self.assertEqual(self.load(f"[client]\nask_first = {name}\n").ask_first, name)
        self.assert_refused(
            lambda: self.load("[client]\nask_first = maybe\n"),
            self.path,
            "[client] ask_first is 'maybe'",
            "auto, always, never",
        )
        self.path.rename(self.directory / "tahoe.cfg")  # which has no settings of ours
        with self.assertRaises(UsageError) as caught:
            load(self.directory)
        self.assertIn("[client] ask_first is not a setting", str(caught.exception))

    def test_foolscap_beside_https(self) -> None:
        """Unless it is not wanted; a Tahoe-LAFS node's directory has no settings of ours."""
        self.assertTrue(self.load("").foolscap_beside)
        text = "[client]\nfoolscap_beside = false\n"
        self.assertFalse(self.load(text).foolscap_beside)
        self.assert_refused(
            lambda: self.load(text.replace("false", "never")),
            self.path,
            "[client] foolscap_beside must be true or false",
        )
        self.load(text)
        self.path.rename(self.directory / "tahoe.cfg")
        with self.assertRaises(UsageError) as caught:
            load(self.directory)
        self.assertIn("[client] foolscap_beside is not a setting", str(caught.exception))

    def test_percent_signs_are_plain_text(self) -> None:
        """There is no interpolation."""
        local = self.load("[local]\ndirectory = 100%\n").local
        assert local is not None
        self.assertEqual(local.directory, self.directory / "100%")

    def test_wrong_settings(self) -> None:
        """Every complaint names the file and the setting, and if it is about one, its line."""
        for text, *words in (
            ("[client]\nshares.needed = three\n", ".cfg:2: [client] shares.needed", "'three'"),
            ("[client]\n\nask_first = perhaps\n", ".cfg:3: [client] ask_first is 'perhaps'"),
            ("# x\n[client]\nforce_foolscap = perhaps\n", ".cfg:3: [client] force_foolscap must"),
            ("[client]\nsegment_size = 128KiB\n", ".cfg:2: ", "of bytes, such as 131072"),
            ("[local]\ndirectory =\n", ".cfg:2: [local] directory names none"),
            ("[client]\nshares.needed = -1\n", "[client] shares.needed", "'-1'"),
            ("[client]\nshares.needed = 0\n", "[client]", "0 of 10"),
            ("[client]\nshares.needed = 11\n", "[client]", "11 of 10"),
            ("[client]\nshares.total = 257\n", "[client]", "257"),
            ("[client]\nsegment_size = 0\n", "[client]", "segment size"),
            ("[client]\nshares.happy = 0\n", "[client]", "0 servers"),
            ("[client]\nshares.happy = 11\n", "[client]", "11 servers"),
            ("[client]\nshares.happy = 1e3\n", "[client] shares.happy", "'1e3'"),
            ("[local]\nservers = many\n", "[local] servers", "'many'"),
            ("[local]\nservers = 0\n", "[local]", "not 0"),
            ("[local]\ndurability = always\n", "[local] durability", "'always'"),
            ("[local]\nkeep_unfinished = long\n", "[local] keep_unfinished", "'long'", "7 days"),
            ("shares.needed = 3\n", "cannot understand", "by hand"),
            ("[client]\nshares.needed = 3\nshares.needed = 4\n", "cannot understand"),
        ):
            self.assert_refused(partial(self.load, text), self.path, *words)

    def test_settings_that_nobody_reads(self) -> None:
        """File, line, and the name that was probably meant."""
        for text, line, words in (
            (
                "[client]\nshare.needed = 3\n",
                2,
                "has no setting share.needed (did you mean shares.needed?)",
            ),
            (
                "# x\n\n[client]\nshares.happy = 7\nSegmentSize: 1\n",
                5,
                "did you mean segment_size?",
            ),
            (
                "[Client]\nshares.needed = 3\n",
                1,
                "there is no section [Client] (did you mean client?)",
            ),
            (
                "[client]\ndurability = batch\n",
                2,
                "has no setting durability (it belongs in [local])",
            ),
            ("[storage]\nreserved-space = 1G\n", 2, "did you mean reserved_space?"),
            ("[client]\nzzzzzzzz = 1\n", 2, "has no setting zzzzzzzz; correct it by hand"),
        ):
            self.assert_refused(partial(self.load, text), f"{self.path}:{line}: ", words)
        self.load("[grid_manager_certificates]\nwhatever = x.cert\n[client]\nSHARES.NEEDED = 3\n")
        self.load(
            "[client]\npeers.preferred = a,\n  nonsense = b\n"
        )  # the second line is the value's

    def test_lines_that_make_no_sense(self) -> None:
        """They are named."""
        for text, words in (
            ("\nshares.needed = 3\n", "line 2: it is in no [section]"),
            (
                "[client]\nshares.needed = 3\nshares.needed = 4\n",
                "line 3: [client] shares.needed is",
            ),
            ("[client]\n[client]\n", "line 2: [client] exists twice"),
            ("[client]\n\nshares.needed\n", "line 3: it is not a setting"),
        ):
            self.assert_refused(partial(self.load, text), self.path, words)

    def test_yaml_says_the_line(self) -> None:
        """Of what is no YAML, of a name that nobody reads; of a server's, where a slip is likely."""
        path = self.directory / "private" / "servers.yaml"
        for text, words in (
            ("storage:\n  a: [\n", "servers.yaml: line 3: "),
            ("storage:\n\ta: {}\n", "servers.yaml: line 2: found character"),
            ("storage:\n\ta: {}\n", "(is it a tab? YAML needs spaces); correct it by hand"),
            (
                "# x\nstorages: {}\n",
                "servers.yaml:2: 'storages' is not read (did you mean storage?)",
            ),
            (
                "storage: {a: {ann: {nickname: x, anonymous-storage-nurl: [x]}}}",
                "server 'a': 'anonymous-storage-nurl' is not read (did you mean anonymous-storage-NURLs?)",
            ),
        ):
            path.write_text(text)
            self.assertIn(words, " | ".join(load(self.directory).warnings))
        path.write_text("storage: {a: {ann: {my-version: x, nickname: x}}}")
        self.assertNotIn("is not read", " | ".join(load(self.directory).warnings))
        path = self.directory / "private" / "introducers.yaml"
        path.write_text("introducer: {}\n")
        words = "introducers.yaml:1: 'introducer' is not read"
        self.assertIn(words, " | ".join(load(self.directory).warnings))

    def test_not_text(self) -> None:
        """A file of another kind."""
        for data, where in (
            (b"\xff\xfe\x00", "1: it is UTF-16"),
            (b"[node]\nnickname = caf\xe9\n", "2: it is not UTF-8"),
        ):
            self.path.write_bytes(data)
            self.assert_refused(
                lambda: load(self.directory),
                f"{self.path}:{where}; save the file as UTF-8 text",
            )

    def test_files_of_any_size(self) -> None:
        """No more is read than settings and secrets may be, though what is too long would make sense."""
        private = self.directory / "private"
        for path, text, words in (
            (private / "convergence", "a" * 200_000, "does not hold a base32 secret"),
            (private / "secret", "a" * 200_000, "does not hold a base32 secret"),
            (self.path, "#" * (1 << 20) + "\n", "is larger than 1048576 bytes"),
        ):
            before = path.read_text()
            path.write_text(text)
            self.assert_refused(lambda: load(self.directory), f"{path} {words}")
            path.write_text(before)
        load(self.directory)

    def test_no_grid_directory(self) -> None:
        """Missing, a file, or without configuration: make one."""
        missing = self.directory / "missing"
        for path in (missing, self.path, self.directory / "private"):
            self.assertFalse(is_configured(path))
            self.assert_refused(partial(load, path), path, "init")

    def test_an_unreadable_file(self) -> None:
        """The reason is told."""
        self.path.unlink()
        self.path.mkdir()
        self.assert_refused(lambda: load(self.directory), "cannot read", self.path)

    def test_secrets(self) -> None:
        """Missing, unreadable, no base32, or too short."""
        secret = self.directory / "private" / "secret"
        for text, word in (("!!!", "base32"), ("ä", "base32"), (base32.encode(b"x" * 31), "31")):
            secret.write_text(text, encoding="utf-8")
            self.assert_refused(lambda: load(self.directory), secret, word, "restore")
        secret.unlink()
        self.assert_refused(lambda: load(self.directory), secret, "missing", "init")
        secret.mkdir()
        self.assert_refused(lambda: load(self.directory), secret, "cannot read")

    def test_the_representation_keeps_secrets(self) -> None:
        """They do not get into logs."""
        loaded = load(self.directory)
        self.assertNotIn(repr(loaded.lease_secret), repr(loaded))
        self.assertNotIn(repr(loaded.convergence), repr(loaded))


class DefaultDirectoryTests(SynchronousTestCase):
    """Where the user's own directory is."""

    def test_the_order(self) -> None:
        """What is said explicitly, then the desktop's convention, then its default."""
        for environment, expected in (
            ({"PIPEGRID_DIR": "/a", "XDG_DATA_HOME": "/b", "HOME": "/c"}, "/a"),
            ({"XDG_DATA_HOME": "/b", "HOME": "/c"}, "/b/pipegrid"),
            ({"XDG_DATA_HOME": "", "HOME": "/c"}, "/c/.local/share/pipegrid"),
            ({"HOME": "/c"}, "/c/.local/share/pipegrid"),
        ):
            with mock.patch.dict(os.environ, environment, clear=True):
                self.assertEqual(default_directory(), Path(expected))

    def test_an_empty_home(self) -> None:
        """An empty or relative HOME is none, and neither the root directory nor one below this one."""
        listed = pwd.getpwuid(os.getuid()).pw_dir
        for home in ("", "x", "./y"):
            with mock.patch.dict(os.environ, {"HOME": home}, clear=True):
                self.assertEqual(default_directory(), Path(listed, ".local/share/pipegrid"))
            with mock.patch.dict(os.environ, {"HOME": home, "PIPEGRID_DIR": "~/g"}, clear=True):
                self.assertEqual(default_directory(), Path(listed, "g"))

    def test_nobodys_home(self) -> None:
        """A user whom no list has is told what to set."""
        with (
            mock.patch.object(client_paths, "getpwuid", side_effect=KeyError),
            mock.patch.dict(os.environ, {"HOME": ""}, clear=True),
        ):
            error = self.assertRaises(UsageError, default_directory)
            self.assertIn("set HOME", str(error))
            os.environ["PIPEGRID_DIR"] = "~/g"
            error = self.assertRaises(UsageError, default_directory)
            self.assertIn("the home directory ~ is not known", str(error))

    def test_a_tilde(self) -> None:
        """As in a unit of systemd or a Containerfile, where no shell makes a home directory of it."""
        home = Path(self.mktemp()).absolute()
        home.mkdir()
        environment = {"PIPEGRID_DIR": "~/grid", "HOME": str(home)}
        with mock.patch.dict(os.environ, environment, clear=True):
            self.assertEqual(default_directory(), home / "grid")
        environment["PIPEGRID_DIR"] = "~nobody-has-this-name/grid"
        with mock.patch.dict(os.environ, environment, clear=True):
            error = self.assertRaises(UsageError, default_directory)
        self.assertIn("$PIPEGRID_DIR is '~nobody-has-this-name/grid'", str(error))


class HomeDirectoryTests(ConfigTestCase):
    """``[local] directory`` that begins with ``~``."""

    def setUp(self) -> None:
        super().setUp()
        create_local(self.directory)
        self.home = Path(self.mktemp()).absolute()
        self.home.mkdir()
        self.patch(os, "environ", {"HOME": str(self.home)})

    def place(self, written: str) -> Path:
        """Return where the storage directories are."""
        (self.directory / "pipegrid.cfg").write_text(f"[local]\ndirectory = {written}\n")
        local = load(self.directory).local
        assert local is not None
        return local.directory

    def test_expanded(self) -> None:
        """It is the user's home directory, or another user's; anywhere else it is a character."""
        self.assertEqual(self.place("~/shares"), self.home / "shares")
        self.assertEqual(self.place("~"), self.home)
        root = os.path.expanduser("~root")
        self.assertEqual(self.place("~root/shares"), Path(root) / "shares")
        for written in ("./~/shares", "a/~", "shares~"):
            self.assertEqual(self.place(written), self.directory / written)

    def test_nobody(self) -> None:
        """A user whom nobody knows is named."""
        self.assert_refused(
            partial(self.place, "~nobody-has-this-name/x"),
            "pipegrid.cfg:2: [local] directory is '~nobody-has-this-name/x'",
            "the home directory ~nobody-has-this-name is not known",
        )

    def test_what_was_made_under_that_name(self) -> None:
        """Shares that an earlier version put into a directory called ``~`` are told of, not lost."""
        old = self.directory / "~" / "shares"
        old.mkdir(parents=True)
        self.assert_refused(
            partial(self.place, "~/shares"), f"{self.home}/shares", old, "'./~/shares'"
        )
        self.assertEqual(self.place("./~/shares"), old)
        old.rename(self.home / "shares")
        self.assertEqual(self.place("~/shares"), self.home / "shares")
