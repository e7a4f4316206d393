"""``pipegrid mirror debian`` as it is used: real processes that are killed, full disks, apt itself."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from pipegrid.cli import mirror_debian_rpm
from pipegrid.cli.command_grammar import start
from pipegrid.cli.console import Console
from pipegrid.disk import file_system_calls as disk
from tests.mirror.archive import BINARY, SUITE, Archive, Signer, check_readers
from tests.mirror.flatarchive import FlatArchive
from tests.mirror.rpmarchive import RpmArchive
from tests.mirror.unchanged import look_of

KILLS = 8


class Files(Resource):
    """Serves what ``files`` has, and counts."""

    isLeaf = True

    def __init__(self, archive: Archive | FlatArchive | RpmArchive) -> None:
        super().__init__()
        self.archive = archive
        self.asked: list[str] = []
        self.kill_at: tuple[int, Callable[[], object]] | None = None

    def render_GET(self, request: Any) -> bytes:
        path = unquote(request.path.decode()).lstrip("/")
        self.asked.append(path)
        if self.kill_at is not None and len(self.asked) == self.kill_at[0]:
            self.kill_at[1]()
        data = self.archive.files.get(path)
        if data is None:
            request.setResponseCode(404)
            return b"gone"
        return data


class DebianCase(TestCase):
    """The command line, a web server on this machine, and who reads the result."""

    def setUp(self) -> None:
        self.dest = Path(self.mktemp()).absolute()
        self.signer = Signer()
        self.addCleanup(self.signer.close)

    def serve(self, archive: Any) -> str:
        """Start a web server; returns its URL."""
        self.archive = archive
        self.server = Files(archive)
        port: Any = reactor.listenTCP(0, Site(self.server), interface="127.0.0.1")  # type: ignore[arg-type]
        self.addCleanup(port.stopListening)
        self.url = f"http://127.0.0.1:{port.getHost().port}/"
        return self.url

    def made(self, **options: Any) -> Archive:
        """Make an archive of today."""
        return Archive(self.signer, now=datetime.now(timezone.utc), **options)

    def arguments(self, *options: str) -> list[str]:
        """``mirror debian``, of all that there is."""
        return [
            *("mirror", "debian", str(self.dest), "--from", self.url, "--suite", "sid"),
            *("--component", "main", "--keyring", self.signer.keyring),
            *options,
        ]

    async def run_command(self, *arguments: str) -> tuple[int, str, str]:
        """Run it here; returns status, stdout, stderr."""
        out, err = io.BytesIO(), io.StringIO()
        status = await start(list(arguments), Console(io.BytesIO(), out, err), reactor)
        return status, out.getvalue().decode(), err.getvalue()

    def found(self) -> set[str]:
        """The paths that are there, our own things and names by hash apart."""
        return {
            str(path.relative_to(self.dest))
            for path in self.dest.rglob("*")
            if path.is_file() and not {".pipegrid-mirror", "by-hash"} & set(path.parts)
        }


class DebianTests(DebianCase):
    """What it does, and what it refuses."""

    async def _test_all_of_it(self) -> None:
        self.serve(self.made(patches=True))
        self.temporary = Path(self.mktemp())
        self.temporary.mkdir()
        self.patch(tempfile, "tempdir", str(self.temporary))
        status, out, _ = await self.run_command(*self.arguments("--dry-run"))
        self.assertEqual((status, look_of(self.dest), os.listdir(self.temporary)), (0, {}, []))
        self.assertIn("20 files", out)
        self.archive.further = {"main/i18n/Translation-en.gz": gzip.compress(b"hello")}
        self.archive.add()
        self.archive.publish()
        everything = {path for path in self.archive.files if "by-hash" not in path}
        options = ("--source", "--diffs", "--also", "*/Translation-*")
        status, out, err = await self.run_command(*self.arguments(*options, "--json"))
        self.assertEqual((status, self.found()), (0, everything), err)
        told = json.loads(out)
        # 21 packages, 3 sources of 2 files, a patch of Packages.
        self.assertEqual((told["fetched"], told["lacking"], told["patched"]), (28, [], 0))
        self.assertGreater(told["index_bytes"], 0)
        status, out, _ = await self.run_command("mirror", "verify", str(self.dest), "--paranoid")
        self.assertEqual(status, 0)
        self.archive.add()
        self.archive.publish()
        before = look_of(self.dest)
        for form in ("packed", "unpacked", "zstd"):
            status, out, _ = await self.run_command(
                *self.arguments("--dry-run", "--delete", "--indexes", form)
            )
            self.assertEqual((status, look_of(self.dest)), (0, before))
            self.assertIn("1 file, ", out)
            self.assertIn("would be fetched", out)
            self.assertEqual(os.listdir(self.temporary), [])
        status, out, _ = await self.run_command(
            *self.arguments("--indexes", "unpacked", "--delete")
        )
        self.assertEqual(status, 0)
        self.assertIn(f"{SUITE}/{BINARY}", self.found())
        self.assertNotIn(f"{SUITE}/{BINARY}.xz", self.found())
        self.assertFalse([path for path in self.found() if "main/s/" in path or "i18n" in path])

    def test_all_of_it(self) -> Deferred[None]:
        """Everything that is asked for, in the form that is asked for; a dry run changes nothing."""
        return Deferred.fromCoroutine(self._test_all_of_it())

    async def _test_kills(self) -> None:
        seed = random.randrange(1 << 30)
        rng = random.Random(seed)
        self.serve(self.made(patches=True, count=150))
        command = [sys.executable, "-m", "pipegrid.cli"]
        killed = number = 0
        # The quicker the machine, the more runs end before they are killed.
        while number < KILLS or (killed <= KILLS // 3 and number < 5 * KILLS):
            number += 1
            options = rng.choice(
                ([], ["--delete"], ["--indexes", "unpacked"], ["--durability", "none"])
            )
            process = subprocess.Popen(
                [*command, *self.arguments(*options)],
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            # Somewhere among its requests, or behind the last of them, when names are given.
            missing = {path for path in self.archive.pool if path.endswith(".deb")} - self.found()
            expected = 5 + len(missing)
            after = rng.choice((rng.randrange(1, expected), expected))
            delay_s = rng.random() * (0.01 if after < expected else 0.05)
            self.server.asked.clear()
            self.server.kill_at = (after, partial(reactor.callLater, delay_s, process.kill))
            await deferToThread(process.communicate)
            killed += process.returncode == -signal.SIGKILL
            try:
                named = check_readers(self.dest)
            except Exception as error:
                raise AssertionError(f"seed {seed}, kill {number}: {error!r}: {error}") from error
            if named or number % 3 == 2:
                for path in rng.sample(sorted(self.archive.pool), 5):
                    self.archive.drop(path)
                for _ in range(40):
                    self.archive.add()
                self.archive.publish()
        self.server.kill_at = None
        here = {path for path in self.archive.pool if (self.dest / path).exists()}
        self.server.asked.clear()
        status, _, err = await self.run_command(*self.arguments("--delete"))
        self.assertEqual(status, 0, f"seed {seed}: {err}")
        self.assertEqual({p for p in self.server.asked if "pool" in p} & here, set(), seed)
        packages = {path for path in self.archive.pool if path.endswith(".deb")}
        self.assertGreaterEqual({p for p in self.found() if p.startswith("pool")}, packages, seed)
        self.assertEqual(check_readers(self.dest), 2 * len(packages), seed)
        status, _, err = await self.run_command(*self.arguments("--delete"))
        self.assertEqual(status, 0, f"seed {seed}: {err}")
        self.assertEqual({p for p in self.found() if p.startswith("pool")}, packages, seed)
        self.assertEqual(check_readers(self.dest), 2 * len(packages), seed)
        self.assertGreater(killed, KILLS // 3, f"seed {seed}: hardly any was killed in time")

    def test_kills(self) -> Deferred[None]:
        """Killed at any moment, no index names what is not there; the next run fetches only the rest."""
        return Deferred.fromCoroutine(self._test_kills())

    async def _test_defaults(self) -> None:
        self.serve(self.made())
        short = ["mirror", "debian", str(self.dest), "--from", self.url, "--suite", "sid"]
        self.patch(mirror_debian_rpm, "DEBIAN_KEYRING", "/nowhere/ring")
        status, _, err = await self.run_command(*short)
        self.assertEqual((status, self.found()), (1, set()))
        self.assertIn("give --keyring, or --allow-unsigned", err)
        self.patch(mirror_debian_rpm, "DEBIAN_KEYRING", self.signer.keyring)
        status, _, err = await self.run_command(*short)
        self.assertEqual(status, 0, err)
        self.assertEqual(check_readers(self.dest), 40)

    def test_defaults(self) -> Deferred[None]:
        """Debian's own key ring if it is there, and all components."""
        return Deferred.fromCoroutine(self._test_defaults())

    async def _test_first_run_fails(self) -> None:
        self.serve(self.made())
        for options in (("--component", "contrib"), ("--keyring", "/nowhere")):
            status, _, _ = await self.run_command(*self.arguments("--delete", *options))
            self.assertEqual(status, 1)
        status, _, err = await self.run_command(*self.arguments("--delete"))
        self.assertEqual(status, 0, err)
        self.assertIn(f"{SUITE}/{BINARY}.xz", self.found())

    def test_first_run_fails(self) -> Deferred[None]:
        """What is our own in a directory does not make it one that was no mirror."""
        return Deferred.fromCoroutine(self._test_first_run_fails())

    async def _test_keep_going(self) -> None:
        archive = self.made()
        self.serve(archive)
        gone = next(path for path in archive.pool if path.endswith(".deb"))
        archive.extra_paragraphs = "Package: weak\nFilename: pool/weak.deb\nSize: 1\n\n"
        archive.publish()
        del archive.files[gone]
        status, _, err = await self.run_command(*self.arguments())
        self.assertEqual(status, 1)
        self.assertIn("--keep-going", err)
        self.assertNotIn(f"{SUITE}/InRelease", self.found())
        status, out, err = await self.run_command(
            *self.arguments("--keep-going", "--json", "--source")
        )
        told = json.loads(out)
        self.assertEqual((status, told["failed"], told["skipped"]), (1, 1, 1))
        self.assertIn(f"{gone} could not be fetched", err)
        self.assertIn("skipped: 'pool/weak.deb' has no hash", err)
        self.assertEqual(
            {path for path in self.found() if "dists" not in path}, archive.pool.keys() - {gone}
        )
        self.assertIn(f"{SUITE}/InRelease", self.found())

    def test_keep_going(self) -> Deferred[None]:
        """A package that is missing for ever, and one that cannot be used, are named; the rest is there."""
        return Deferred.fromCoroutine(self._test_keep_going())

    async def _test_bad_input(self) -> None:
        self.serve(self.made())
        for options, words in (
            (["--suite", "../x"], "is not a suite"),
            (["--component", "contrib"], "names no contrib"),
            (["--arch", "m68k"], "the architectures all amd64"),
            (["--allow-unsigned"], "give one of them"),
            (["--keyring", "/nowhere/ring"], "/nowhere/ring cannot be read"),
            (["--also"], "requires an argument"),
        ):
            status, out, err = await self.run_command(*self.arguments(*options))
            self.assertIn(status, (1, 2), err)
            self.assertEqual((out, err.count("\n")), ("", 1), err)
            self.assertIn(words, err)
            self.assertEqual(self.found(), set())

    def test_bad_input(self) -> Deferred[None]:
        """One sentence each."""
        return Deferred.fromCoroutine(self._test_bad_input())

    def mount(self, *arguments: str) -> bool:
        """Mount something at the destination, until the test ends; returns whether we may."""
        self.dest.mkdir(exist_ok=True)
        command = ["mount", *arguments, str(self.dest)]
        if os.geteuid() or subprocess.run(command, capture_output=True, timeout=60).returncode:
            return False
        self.addCleanup(subprocess.run, ["umount", str(self.dest)], check=True, timeout=60)
        return True

    def make_small(self, limit_bytes: int) -> Callable[[], object]:
        """Give the destination a disk of this size, a pretended one if we may not mount; returns its end."""
        if self.mount("-t", "tmpfs", "-o", f"size={limit_bytes}", "none"):
            larger = ["mount", "-o", "remount,size=8m", str(self.dest)]
            return partial(subprocess.run, larger, check=True, timeout=60)
        real, room = disk.write_all_pieces, [limit_bytes]

        def limited(fd: int, pieces: Any, offset: int) -> None:
            room[0] -= sum(map(len, pieces))
            if room[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd, pieces, offset)

        self.patch(disk, "write_all_pieces", limited)
        return partial(self.patch, disk, "write_all_pieces", real)

    async def _test_full_disk(self) -> None:
        packages = {
            f"pool/main/p/p{n}/p{n}_1_amd64.deb": random.Random(n).randbytes(60_000)
            for n in range(40)
        }
        self.serve(self.made(packages=packages))
        undo = self.make_small(1 << 20)
        status, out, err = await self.run_command(*self.arguments())
        self.assertEqual((status, out), (1, ""))
        self.assertIn("the disk is full; free some space and run it again", err)
        self.assertEqual([path for path in self.found() if "dists" in path], [])
        for path in self.found():
            self.assertEqual((self.dest / path).read_bytes(), packages[path])
        undo()
        had = self.found()
        self.server.asked.clear()
        status, _, err = await self.run_command(*self.arguments())
        self.assertEqual(status, 0, err)
        self.assertEqual(set(self.server.asked) & had, set())
        self.assertEqual(check_readers(self.dest), 80)

    def test_full_disk(self) -> Deferred[None]:
        """One sentence, nothing wrong is seen, no file stays open; with room again it goes on."""
        return Deferred.fromCoroutine(self._test_full_disk())

    async def _test_read_only(self) -> None:
        self.serve(self.made())
        await self.run_command(*self.arguments())
        before = self.found()
        self.archive.add()
        self.archive.publish()
        words = "Permission denied"
        if self.mount("--bind", str(self.dest)):
            again = ["mount", "-o", "remount,bind,ro", str(self.dest)]
            subprocess.run(again, check=True, timeout=60)
            words = "Read-only file system"
        else:
            hidden = self.dest / ".pipegrid-mirror"
            (hidden / "lock").chmod(0o400)
            self.addCleanup((hidden / "lock").chmod, 0o600)
        status, out, err = await self.run_command(*self.arguments())
        self.assertEqual((status, out, err.count("\n")), (1, "", 1), err)
        self.assertIn(words, err)
        self.assertEqual(self.found(), before)

    def test_read_only(self) -> Deferred[None]:
        """One sentence."""
        return Deferred.fromCoroutine(self._test_read_only())

    async def _test_two_at_once(self) -> None:
        self.serve(self.made())
        first = self.run_command(*self.arguments())
        outcomes = [
            Deferred.fromCoroutine(each) for each in (first, self.run_command(*self.arguments()))
        ]
        results = [await each for each in outcomes]
        self.assertEqual([status for status, _, _ in results], [0, 1])
        self.assertIn("another process is mirroring", results[1][2])
        check_readers(self.dest)

    def test_two_at_once(self) -> Deferred[None]:
        """The second says so, and disturbs nothing."""
        return Deferred.fromCoroutine(self._test_two_at_once())


class AptCase(DebianCase):
    """
    apt reads the result.

    Attributes:
        source: what follows the URL in its list of sources.
    """

    source = "sid main"

    def build(self) -> dict[str, bytes]:
        """Two real packages."""
        made = {}
        for name in ("pg-one", "pg-two"):
            root = Path(self.mktemp())
            (root / "DEBIAN").mkdir(parents=True)
            (root / "DEBIAN" / "control").write_text(
                f"Package: {name}\nVersion: 1~rc1\nArchitecture: amd64\n"
                "Maintainer: T <t@example.com>\nDescription: nothing\n"
            )
            out = Path(self.mktemp())
            subprocess.run(
                ["dpkg-deb", "-Zgzip", "--root-owner-group", "--build", str(root), str(out)],
                check=True,
                capture_output=True,
                timeout=60,
            )
            made[f"pool/main/p/{name}/{name}_1~rc1_amd64.deb"] = out.read_bytes()
        return made

    async def apt_gets(self, form: str, *packages: str) -> list[bytes]:
        """
        Have apt-get, which knows nothing yet, read the indexes, and fetch packages; returns these.

        Args:
            form: of the indexes. Unpacked ones it reads from servers and by ``copy:``; by ``file:`` it takes
                them for wrong ones of the packed form.
        """
        self.apt_root = Path(self.mktemp()).absolute()
        scheme = "copy" if form == "unpacked" else "file"
        await deferToThread(self.apt, scheme, "update", "--error-on=any")
        out = await deferToThread(self.apt, scheme, "download", *packages)
        return sorted(path.read_bytes() for path in out.iterdir())

    def apt(self, scheme: str, *arguments: str) -> Path:
        """Run apt-get with directories of its own; returns where it downloads to."""
        root = self.apt_root
        for name in ("state/lists/partial", "cache/archives/partial", "etc/preferences.d", "out"):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in ("status", "apt.conf"):
            (root / name).touch()
        (root / "sources.list").write_text(
            f"deb [signed-by={self.signer.keyring} arch=amd64] {scheme}:{self.dest} {self.source}\n"
        )
        for path in (Path(self.signer.home), Path(self.signer.keyring)):
            path.chmod(0o755)
        options = {
            "Dir::Etc": root / "etc",
            "Dir::Etc::sourcelist": root / "sources.list",
            "Dir::State": root / "state",
            "Dir::State::status": root / "status",
            "Dir::Cache": root / "cache",
            "APT::Architecture": "amd64",
            "APT::Architectures": "amd64",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Acquire::Check-Date": "false",
        }
        command = ["apt-get", *(f"-o{key}={value}" for key, value in options.items()), *arguments]
        done = subprocess.run(
            command,
            cwd=root / "out",
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "APT_CONFIG": str(root / "apt.conf"), "LC_ALL": "C"},
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertNotIn("W:", done.stderr)
        return root / "out"


class AptTests(AptCase):
    """In the form in which it reads most archives."""

    async def _test_apt(self) -> None:
        packages = self.build()
        self.serve(self.made(packages=packages, patches=True))
        for form in ("packed", "unpacked"):
            status, _, err = await self.run_command(*self.arguments("--indexes", form))
            self.assertEqual(status, 0, err)
            got = await self.apt_gets(form, "pg-one", "pg-two")
            self.assertEqual(got, sorted(packages.values()))

    def test_apt(self) -> Deferred[None]:
        """``apt-get update`` and ``apt-get download`` work from the result, in either form."""
        return Deferred.fromCoroutine(self._test_apt())
