"""``pipegrid mirror --reindex --sign-with KEY``: what is published, who reads it, and what stops it."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import lzma
import os
import re
import shutil
from collections.abc import Callable
from hashlib import new as new_hash
from hashlib import sha256, sha512
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.sax.saxutils import quoteattr

import zstandard
from misc.mirror_world.case import Case
from misc.mirror_world.packages import make_rpms, run
from misc.mirror_world.readers import read, served
from misc.mirror_world.rpm import COMPS
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from pipegrid.disk import file_system_calls as disk
from pipegrid.mirror.decompression import unpacked
from pipegrid.mirror.rpm_metadata import read_repomd
from tests.cli.test_mirror_filters import DebianFilterCase
from tests.cli.test_mirror_rpm import RpmCase
from tests.mirror.archive import BINARY, SOURCES, SUITE, Signer, check_readers
from tests.mirror.flatarchive import FlatArchive
from tests.mirror.rpmarchive import REPOMD, RpmArchive

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

    async def _test_clock(self) -> None:
        future = Signer(at="20991231T235959")
        self.addCleanup(future.close)
        key = self.key.with_suffix(".future")
        key.write_bytes(future._gpg("--armor", "--export-secret-keys"))
        options = ("--include=p1", "--reindex", "--sign-with", str(key))
        status, _, err = await self.run_command(*self.arguments(*options))
        self.assertEqual((status, err.count("\n"), self.found()), (2, 1, set()), err)
        self.assertIn("of --sign-with cannot sign", err)

    def test_clock(self) -> Deferred[None]:
        """A clock that is before the key was made."""
        return Deferred.fromCoroutine(self._test_clock())

    async def _test_full_disk(self) -> None:
        await self.built("--include=p1")
        before = {path: (self.dest / path).read_bytes() for path in self.found()}
        self.archive.publish()
        for name in ("own.new", "reindex.0.xz", "reindex.0.gz"):
            write = disk.write_all

            def full(fd: int, data: bytes, at: int, name: str = name, write: Any = write) -> None:
                if os.readlink(f"/proc/self/fd/{fd}").endswith(name):
                    raise OSError(errno.ENOSPC, "full")
                write(fd, data, at)

            with patch.object(disk, "write_all", full):
                status, _, err = await self.built("--include=p[12]")
            self.assertEqual(status, 1)
            self.assertIn("the disk is full", err)
            after = {path: (self.dest / path).read_bytes() for path in before}
            self.assertEqual(after, before)
        status, _, err = await self.built("--include=p[12]")
        self.assertEqual((status, self.names()), (0, ["p1", "p2"]), err)

    def test_full_disk(self) -> Deferred[None]:
        """A disk that is full while new indexes are written: readers see the old ones."""
        return Deferred.fromCoroutine(self._test_full_disk())

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


class Directory:
    """Files of a directory, as ``Files`` serves them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def files(self) -> dict[str, bytes]:
        """All that is there now."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file()
        }


class RpmReindexTests(RpmCase):
    """RPM repositories, of real programs."""

    if missing := [
        p for p in ("rpmbuild", "rpmsign", "createrepo_c", "dnf") if not shutil.which(p)
    ]:
        skip = f"{' and '.join(missing)} not installed"

    def setUp(self) -> None:
        super().setUp()
        self.ours = Signer()
        self.addCleanup(self.ours.close)
        self.key = Path(self.mktemp()).absolute()
        self.key.write_bytes(self.ours._gpg("--armor", "--export-secret-keys"))
        self.reindex = ("--reindex", "--sign-with", str(self.key), "--json")
        self.root = Path(self.mktemp()).absolute()

    def make(self, *options: str) -> None:
        """Make a repository of four packages, and serve it."""
        make_rpms(self.root / "Packages", ("one", "two", "three", "other"))
        (self.root / "comps.xml").write_text(COMPS)
        self.publish(*options)
        archive: Any = Directory(self.root)
        self.serve(archive)

    def publish(self, *options: str) -> None:
        """Make its indexes, and sign them."""
        groups = "--groupfile=comps.xml"
        run("createrepo_c", "--quiet", groups, "--retain-old-md=0", *options, str(self.root))
        repomd = self.root / REPOMD
        signature = self.signer.detached(repomd.read_bytes())
        repomd.with_suffix(".xml.asc").write_bytes(signature)

    async def built(self, *options: str) -> tuple[int, dict[str, Any], str]:
        """Mirror with new indexes."""
        status, out, err = await self.run_command(*self.arguments(*self.reindex, *options))
        return status, json.loads(out) if out else {}, err

    def index(self, kind: str) -> str:
        """An index that is published; looks whether it is what ``repomd.xml`` says."""
        repomd = read_repomd((self.dest / REPOMD).read_bytes(), "x")
        each = next(each for each in repomd.files if each.kind == kind)
        data = (self.dest / each.file.path).read_bytes()
        self.assertEqual((sha256(data).digest(), len(data)), (each.file.digest, each.file.size))
        text = b"".join(unpacked(str(self.dest / each.file.path)))
        assert each.opened is not None
        self.assertEqual((sha256(text).digest(), len(text)), (each.opened.digest, each.opened.size))
        return text.decode()

    def names(self) -> list[str]:
        """The packages of all indexes."""
        found = re.findall("<name>(.*?)</name>", self.index("primary"))
        for kind in ("filelists", "other"):
            text = self.index(kind)
            self.assertEqual(re.findall(r'<package pkgid="\w+" name="(.*?)"', text), found)
            self.assertIn(f'packages="{len(found)}"', text)
        self.assertIn(f'packages="{len(found)}"', self.index("primary"))
        return sorted(found)

    async def _test_filtered(self) -> None:
        for number, options in enumerate(
            (("--revision=7", "--distro=cpe:/o:t,T"), ("--xz",), ("--general-compress-type=bz2",))
        ):
            self.root = self.root.with_name(f"root{number}")
            self.make(*options)
            self.dest = self.dest.with_name(f"dest{number}")
            status, told, err = await self.built("--include=o*")
            self.assertEqual((status, self.names()), (0, ["one", "other"]), err)
            theirs = read_repomd((self.root / REPOMD).read_bytes(), "x")
            ours = read_repomd((self.dest / REPOMD).read_bytes(), "x")
            self.assertEqual(ours.head, theirs.head)
            kinds = [each.kind for each in theirs.files if not each.kind.endswith("_db")]
            self.assertEqual([each.kind for each in ours.files], kinds)
            self.assertEqual((self.dest / "x.rpm").exists(), False)
            before = self.found()
            self.assertEqual(len([path for path in before if path.endswith(".rpm")]), 2)
            for further in ((), ("--delete",), ("--dry-run",)):
                status, told, _ = await self.built("--include=o*", "--exit-unchanged", *further)
                self.assertEqual((status, told["changed"], self.found()), (6, False, before))
            status, _, err = await self.run_command(
                "mirror", "verify", str(self.dest), "--paranoid"
            )
            self.assertEqual((status, err), (0, ""))

    def test_filtered(self) -> Deferred[None]:
        """Elements of what was selected, in several forms; the same run again changes nothing."""
        return Deferred.fromCoroutine(self._test_filtered())

    async def _test_next(self) -> None:
        self.make()
        await self.built("--include=o*")
        make_rpms(self.root / "More", ("only",))
        next((self.root / "Packages").glob("other-*")).unlink()
        self.publish()
        status, told, _ = await self.built("--include=o*", "--dry-run")
        self.assertTrue(told["changed"])
        status, told, err = await self.built("--include=o*", "--delete")
        self.assertEqual((status, self.names()), (0, ["one", "only"]), err)
        status, _, err = await self.built("--include=two", "--delete")
        self.assertEqual((status, self.names()), (0, ["one", "only", "two"]), err)
        status, _, err = await self.built("--include=two", "--delete-excluded")
        self.assertEqual((status, self.names()), (0, ["two"]), err)
        status, _, err = await self.run_command(*self.arguments("--include=two", "--delete"))
        theirs = (self.root / REPOMD).read_bytes()
        self.assertEqual((status, self.found()[REPOMD]), (0, theirs), err)

    def test_next(self) -> Deferred[None]:
        """New packages, other filters, and the repository's own indexes again."""
        return Deferred.fromCoroutine(self._test_next())

    async def _test_dnf(self) -> None:
        make_rpms(self.root / "Packages", ("one", "two"))
        for path in (self.root / "Packages").iterdir():
            sign_rpm(path, self.ours)
        (self.root / "comps.xml").write_text(COMPS)
        self.publish()
        archive: Any = Directory(self.root)
        self.serve(archive)
        status, _, err = await self.built("--include=one")
        self.assertEqual(status, 0, err)
        case = Case("ours", lambda _: None, is_signed=True)
        with served(self.dest) as url:
            got = await deferToThread(read, case, url, Path(self.ours.armored))
        self.assertEqual([each.partition("-")[0] for each in got], ["one"])

    def test_dnf(self) -> Deferred[None]:
        """dnf verifies repomd.xml by the new key, and reposync brings what is named."""
        return Deferred.fromCoroutine(self._test_dnf())

    async def _test_missing(self) -> None:
        self.make()
        next((self.root / "Packages").glob("other-*")).unlink()
        status, _, _ = await self.built()
        self.assertEqual((status, REPOMD in self.found()), (1, False))
        status, _, _ = await self.built("--keep-going")
        self.assertEqual((status, self.names()), (1, ["one", "three", "two"]))

    def test_missing(self) -> Deferred[None]:
        """What no mirror has is in no index."""
        return Deferred.fromCoroutine(self._test_missing())

    async def _test_unsigned_packages(self) -> None:
        self.make()
        sign_rpm(next((self.root / "Packages").glob("one-*")), self.signer)
        self.publish()
        await self.built()
        status, _, _ = await self.built("--gpgcheck", "--keep-going")
        self.assertEqual((status, self.names()), (1, ["one"]))

    def test_unsigned_packages(self) -> Deferred[None]:
        """A package that was there and that nobody signed is in no index of a run that looks."""
        return Deferred.fromCoroutine(self._test_unsigned_packages())

    async def _test_places(self) -> None:
        archive = RpmArchive(self.signer, count=0)
        self.serve(archive)
        for name, further in (
            ("a", f"xml:base={quoteattr(self.url + 'sub/')} "),
            ("b", 'xml:base="sub" '),
            ("c", ""),
        ):
            made = archive.add(name, further=further)
            made.path = made.path.replace("/", "/.//")
        archive.head = "<!-- a > b -->"
        archive.publish()
        for made in archive.packages:
            place = made.path.replace("/.//", "/")
            archive.files[f"sub/{place}" if made.further else place] = made.data
        status, _, err = await self.built()
        self.assertEqual(status, 0, err)
        places = re.findall('<location href="(.*?)"/>', self.index("primary"))
        there = sorted(path for path in self.found() if path.endswith(".rpm"))
        self.assertEqual(sorted(places), there)

    def test_places(self) -> Deferred[None]:
        """Packages are named where they are, without xml:base."""
        return Deferred.fromCoroutine(self._test_places())


def sign_rpm(path: Path, signer: Signer) -> None:
    """Sign a package in its header."""
    defined = {"_gpg_name": "Test", "_gpg_path": signer.home, "__gpg": shutil.which("gpg")}
    given = [word for name, value in defined.items() for word in ("--define", f"{name} {value}")]
    run("rpmsign", *given, "--addsign", str(path))


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
            for ending in ("zst", "bz2"):
                packed = (self.dest / SUITE / f"{BINARY}.{ending}").read_bytes()
                self.assertEqual(UNPACKERS[ending](packed).count(b"Package: "), 1)
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

UNPACKERS: dict[str, Callable[[bytes], bytes]] = {
    "bz2": bz2.decompress,
    "zst": lambda packed: zstandard.ZstdDecompressor().stream_reader(packed).read(),
}
