"""``pipegrid mirror --reindex --sign-with KEY``: what is published, who reads it, and what stops it."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from hashlib import new as new_hash
from hashlib import sha256, sha512
from pathlib import Path
from typing import Any
from unittest.mock import patch

import zstandard
from misc.mirror_world.case import Case
from misc.mirror_world.readers import read, served
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from tests.cli.test_mirror_filters import DebianFilterCase
from tests.mirror.archive import BINARY, SOURCES, SUITE, Signer, check_readers
from tests.mirror.flatarchive import FlatArchive

LISTED = re.compile(r"^ ([0-9a-f]{64,128}) +([0-9]+) (\S+)$", re.MULTILINE)


class ReindexCase(DebianFilterCase):
    """A key of our own, in a file, and an archive that is signed by another one."""

    def setUp(self) -> None:
        super().setUp()
        self.ours = Signer()
        self.addCleanup(self.ours.close)
        self.key = Path(self.mktemp()).absolute()
        self.key.write_bytes(self.ours._gpg("--armor", "--export-secret-keys"))
        self.reindex = ("--reindex", "--sign-with", str(self.key))

    async def built(self, *options: str) -> tuple[int, dict[str, Any], str]:
        """Mirror with new indexes."""
        return await self.run_json(*self.reindex, *options)

    def release(self) -> str:
        """The release file that is published; looks whether all that it names is right, and by hash."""
        text = (self.dest / SUITE / "Release").read_text()
        for digest, size, path in LISTED.findall(text):
            place = self.dest / SUITE / path
            if not place.exists():
                self.assertIn(f"{path}.xz", text)
                continue
            data = place.read_bytes()
            kind, function = ("SHA256", sha256) if len(digest) == 64 else ("SHA512", sha512)
            self.assertEqual((function(data).hexdigest(), len(data)), (digest, int(size)))
            if "Acquire-By-Hash: yes" in text:
                self.assertEqual((place.parent / "by-hash" / kind / digest).read_bytes(), data)
        return text

    def names(self, base: str = BINARY) -> list[str]:
        """The packages of an index that is published, which is the same in all its forms."""
        text = lzma.decompress((self.dest / SUITE / f"{base}.xz").read_bytes())
        other = gzip.decompress((self.dest / SUITE / f"{base}.gz").read_bytes())
        self.assertEqual(text, other)
        digest = sha256(text).hexdigest()
        self.assertIn(f" {digest} {len(text):8} {base}\n", self.release())
        return re.findall(r"^Package: (.*)$", text.decode(), re.MULTILINE)


class ReindexTests(ReindexCase):
    """Debian archives."""

    async def _test_filtered(self) -> None:
        status, told, err = await self.built("--include=p1", "--include=p2", "--sources")
        self.assertEqual((status, told["skipped"], told["changed"]), (0, 0, True), err)
        self.assertEqual((self.names(), self.names(SOURCES)), (["p1", "p2"], ["s21"]))
        self.assertEqual(self.packages(), ["p1", "p2", "s21", "s21"])
        theirs = self.archive.files[f"{SUITE}/Release"].decode()
        ours = self.release()
        self.assertEqual(ours.partition("SHA256:")[0], theirs.partition("MD5Sum:")[0])
        check_readers(self.dest)
        status, _, err = await self.run_command("mirror", "verify", str(self.dest), "--paranoid")
        self.assertEqual((status, err), (0, ""))
        before = {path: os.stat(self.dest / path).st_mtime_ns for path in self.found()}
        asked = len(self.server.asked)
        for options in ((), ("--delete",), ("--dry-run",)):
            status, told, _ = await self.built(
                "--include=p1", "--include=p2", "--sources", "--exit-unchanged", *options
            )
            self.assertEqual((status, told["changed"]), (6, False), options)
            after = {path: os.stat(self.dest / path).st_mtime_ns for path in self.found()}
            self.assertEqual(after, before)
            if "--dry-run" not in options:  # it does not touch what was kept aside
                names = {path.rpartition("/")[2] for path in self.server.asked[asked:]}
                self.assertEqual(names, RELEASES)

    def test_filtered(self) -> Deferred[None]:
        """The paragraphs of what was selected, the archive's fields; the same run again changes nothing."""
        return Deferred.fromCoroutine(self._test_filtered())

    async def _test_apt(self) -> None:
        await self.built("--include=p1", "--include=p2?", "--include=p2")
        case = Case("ours", lambda _: None, suite="sid", components=("main",), is_signed=True)
        with served(self.dest) as url:
            got = await deferToThread(read, case, url, Path(self.ours.armored))
        self.assertEqual(sorted(each.partition("_")[0] for each in got), ["p1", "p2", "p20"])
        with served(self.dest) as url:
            found = deferToThread(read, case, url, Path(self.signer.armored))
            await self.assertFailure(found, RuntimeError)  # the archive's key signs nothing here

    def test_apt(self) -> Deferred[None]:
        """apt verifies it with the new key, finds no other packages, and downloads each."""
        return Deferred.fromCoroutine(self._test_apt())

    async def _test_next(self) -> None:
        await self.built("--include=p1", "--include=p2")
        first = self.release()
        self.archive.drop("pool/main/p/p2/p2_1~rc1+b2_amd64.deb")
        self.archive.publish()
        status, told, _ = await self.built("--include=p1", "--include=p2", "--dry-run")
        self.assertTrue(told["changed"])
        status, told, _ = await self.built("--include=p[12]", "--delete-excluded")
        self.assertEqual((status, self.names(), self.packages()), (0, ["p1"], ["p1", "p2"]))
        self.assertNotEqual(self.release(), first)
        check_readers(self.dest)  # also of the indexes before, which name p2
        self.archive.publish()
        status, told, _ = await self.built("--include=p1", "--delete-excluded")
        self.assertEqual((status, self.packages()), (0, ["p1"]))
        status, told, _ = await self.run_json("--include=p1", "--delete")  # as it is signed again
        self.assertEqual(status, 0)
        self.assertEqual(
            (self.dest / SUITE / "InRelease").read_bytes(), self.archive.files[f"{SUITE}/InRelease"]
        )
        status, _, _ = await self.built("--include=p1", "--delete")
        self.assertEqual((status, self.names()), (0, ["p1"]))

    def test_next(self) -> Deferred[None]:
        """A new generation, one without new indexes, and back again."""
        return Deferred.fromCoroutine(self._test_next())

    async def _test_runs_share(self) -> None:
        await self.built("--include=p1")
        status, _, _ = await self.built("--include=p2", "--delete")
        self.assertEqual((status, self.names(), self.packages()), (0, ["p1", "p2"], ["p1", "p2"]))
        status, _, _ = await self.built("--include=p2", "--delete-excluded")
        self.assertEqual((status, self.names(), self.packages()), (0, ["p2"], ["p2"]))

    def test_runs_share(self) -> Deferred[None]:
        """Runs with different filters: an index names what any of them selects, as far as it exists."""
        return Deferred.fromCoroutine(self._test_runs_share())

    async def _test_missing(self) -> None:
        path = "pool/main/p/p2/p2_1~rc1+b2_amd64.deb"
        del self.archive.files[path]
        status, _, _ = await self.built("--include=p[12]")
        self.assertEqual((status, (self.dest / SUITE).exists()), (1, False))
        status, _, _ = await self.built("--include=p[12]", "--keep-going")
        self.assertEqual((status, self.names()), (1, ["p1"]))
        check_readers(self.dest)

    def test_missing(self) -> Deferred[None]:
        """What no mirror has is not named by the new index."""
        return Deferred.fromCoroutine(self._test_missing())

    async def _test_no_signature(self) -> None:
        await self.built("--include=p1")
        before = {path: (self.dest / path).read_bytes() for path in self.found()}
        self.archive.publish()
        place = Path(self.mktemp()).absolute()
        place.mkdir()
        program = place / "gpg"
        program.write_text(
            '#!/bin/sh\ncase "$*" in *--clearsign*) exit 2;; esac\nexec /usr/bin/gpg "$@"\n'
        )
        program.chmod(0o755)
        with patch.dict(os.environ, {"PATH": f"{place}:{os.environ['PATH']}"}):
            status, _, err = await self.built("--include=p[12]")
        self.assertEqual((status, err.count("\n")), (2, 1), err)
        self.assertIn("of --sign-with cannot sign: gpg fails; nothing was published", err)
        after = {path: (self.dest / path).read_bytes() for path in self.found()}
        self.assertEqual({each: after[each] for each in before}, before)
        status, _, _ = await self.built("--include=p[12]")
        self.assertEqual((status, self.names()), (0, ["p1", "p2"]))

    def test_no_signature(self) -> Deferred[None]:
        """gpg that fails when all is fetched: status 2, and readers see what they saw."""
        return Deferred.fromCoroutine(self._test_no_signature())

    async def _test_refused(self) -> None:
        protected = Path(self.mktemp()).absolute()
        protected.mkdir(0o700)
        gpg = ("--homedir", str(protected), "--passphrase", "x", "--pinentry-mode", "loopback")
        self.ours._gpg(*gpg, "--quick-generate-key", "P <p@x>", "ed25519", "sign", "never")
        locked = self.key.with_suffix(".locked")
        locked.write_bytes(self.ours._gpg(*gpg, "--export-secret-keys"))
        for options, said in (
            (("--reindex",), "give --sign-with KEY"),
            (("--sign-with", str(self.key)), "give --reindex as well"),
            (("--reindex", "--sign-with", "nobody@example.com"), "no such secret key"),
            (("--reindex", "--sign-with", self.signer.keyring), "it has no secret key"),
            (("--reindex", "--sign-with", "/etc/passwd"), "it is not a key that gpg exported"),
            (("--reindex", "--sign-with", str(locked)), "it needs a passphrase"),
            ((*self.reindex, "--diffs"), "leave out --diffs and --indexes"),
            ((*self.reindex, "--indexes=zstd"), "leave out --diffs and --indexes"),
        ):
            status, _, err = await self.run_command(*self.arguments(*options))
            self.assertEqual((status, err.count("\n")), (2, 1), (options, err))
            self.assertIn(said, err)
        self.assertEqual(self.server.asked, [])
        shutil.rmtree(protected)

    def test_refused(self) -> Deferred[None]:
        """Keys that cannot sign, and options that do not go with it, before anything is asked."""
        return Deferred.fromCoroutine(self._test_refused())

    async def _test_ring(self) -> None:
        with patch.dict(os.environ, {"GNUPGHOME": self.ours.home}):
            status, told, err = await self.run_json(
                "--include=p1", "--reindex", "--sign-with", "test@example.com"
            )
        self.assertEqual((status, self.names()), (0, ["p1"]), err)
        status, told, _ = await self.built("--include=p1", "--exit-unchanged")
        self.assertEqual((status, told["changed"]), (6, False))

    def test_ring(self) -> Deferred[None]:
        """A key of the ring of the user; the same key in a file signs nothing again."""
        return Deferred.fromCoroutine(self._test_ring())


class FormTests(ReindexCase):
    """Release files and forms of indexes as archives have them."""

    def setUp(self) -> None:
        super().setUp()
        self.flat = FlatArchive(self.signer)

    async def _test_forms(self) -> None:
        archive = self.archive
        files, released = archive.files, archive.files[f"{SUITE}/Release"].decode()
        text = archive.packages_text()
        named = {
            f"{BINARY}{ending}": pack(text) for ending, pack in (*PACKERS.items(), ("", bytes))
        }
        named["main/i18n/Translation-en.xz"] = lzma.compress(b"words")
        head = released.partition("MD5Sum:")[0] + "Signed-By: 0123456789ABCDEF\n"
        for algorithms in (("SHA256", "SHA512"), ("SHA512",), ("MD5Sum", "SHA1", "SHA256")):
            lines = [head.rstrip("\n")]
            for kind in algorithms:
                lines.append(f"{kind}:")
                for path, data in named.items():
                    digest = new_hash(kind.removesuffix("Sum").lower(), data).hexdigest()
                    lines.append(f" {digest} {len(data)} {path}")
                    files[f"{SUITE}/{path}"] = data
                    files[f"{SUITE}/{os.path.dirname(path)}/by-hash/{kind}/{digest}"] = data
            release = "\n".join([*lines, ""]).encode()
            files[f"{SUITE}/Release"] = release
            files[f"{SUITE}/InRelease"] = self.signer.inline(release)
            files[f"{SUITE}/Release.gpg"] = self.signer.detached(release)
            self.dest = self.dest.with_name(f"dest-{len(algorithms)}{algorithms[0]}")
            status, _, err = await self.built("--include=p1", "--also=*/Translation-*")
            self.assertEqual((status, self.names()), (0, ["p1"]), err)
            ours = self.release()
            self.assertIn(" main/i18n/Translation-en.xz\n", ours)
            self.assertNotIn("Signed-By", ours)
            self.assertNotIn("MD5Sum", ours)
            self.assertEqual("SHA512:" in ours, "SHA512" in algorithms)
            for program, ending in (("zstd", "zst"), ("bzip2", "bz2")):
                place = self.dest / SUITE / f"{BINARY}.{ending}"
                done = subprocess.run([program, "-dc", place], capture_output=True, check=True)
                self.assertEqual(done.stdout.count(b"Package: "), 1)
            self.assertFalse((self.dest / SUITE / BINARY).exists())

    def test_forms(self) -> Deferred[None]:
        """Each form that is listed, the hashes that prove them, and other files that are kept."""
        return Deferred.fromCoroutine(self._test_forms())

    async def _test_flat(self) -> None:
        self.serve(self.flat)
        given = ["mirror", "debian", str(self.dest), "--from", self.url, "--ignore-dates"]
        given += [
            "--suite",
            "./",
            "--keyring",
            self.signer.keyring,
            *self.reindex,
            "--include=p[24]",
        ]
        status, _, err = await self.run_command(*given)
        self.assertEqual(status, 0, err)
        case = Case("ours", lambda _: None, suite="./", is_signed=True)
        with served(self.dest) as url:
            got = await deferToThread(read, case, url, Path(self.ours.armored))
        self.assertEqual(sorted(each.partition("_")[0] for each in got), ["p2", "p4"])
        status, _, _ = await self.run_command(*given, "--exit-unchanged")
        self.assertEqual(status, 6)

    def test_flat(self) -> Deferred[None]:
        """A flat archive, read by apt."""
        return Deferred.fromCoroutine(self._test_flat())


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
RELEASES = {"InRelease", "Release", "Release.gpg"}
