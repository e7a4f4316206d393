"""Archives that other mirroring programs could not mirror, as their users reported: kept, and rebuilt."""

from __future__ import annotations

import gzip
import re
from datetime import datetime, timezone
from hashlib import sha256, sha512

from twisted.internet.defer import Deferred

from tests.cli.test_mirror_debian import DebianCase
from tests.cli.test_mirror_rpm import RpmCase
from tests.mirror.archive import BINARY, SOURCES, SUITE, Archive, check_readers
from tests.mirror.flatarchive import FlatArchive
from tests.mirror.rpmarchive import PACKERS, REPOMD, RpmArchive


class DebianReportTests(DebianCase):
    """Archives of Debian packages."""

    def setUp(self) -> None:
        super().setUp()
        self.key = f"{self.signer.home}/secret.asc"
        with open(self.key, "wb") as file:
            file.write(self.signer._gpg("--armor", "--export-secret-keys"))

    def release(self, archive: Archive, named: dict[str, bytes]) -> None:
        """Let the release file name these, and sign it."""
        text = archive.release_text(named)
        for name, data in (
            ("Release", text),
            ("InRelease", self.signer.inline(text)),
            ("Release.gpg", self.signer.detached(text)),
        ):
            archive.files[f"{SUITE}/{name}"] = data
        archive.files.update({f"{SUITE}/{path}": data for path, data in named.items()})

    async def mirrored(self, *options: str, count: int, suite: str = "sid") -> None:
        """Mirror it as it is, and with new indexes; each time so many packages and sources are there."""
        for further in ((), ("--reindex", "--sign-with", self.key)):
            self.dest = self.dest.with_name(f"dest-{len(further)}")
            command = ["mirror", "debian", str(self.dest), "--from", self.url, "--suite", suite]
            command += ["--keyring", self.signer.keyring, "--ignore-dates", *further, *options]
            status, _, err = await self.run_command(*command)
            self.assertEqual(status, 0, err)
            found = [
                path for path in self.found() if not re.search("Release|Packages|Sources", path)
            ]
            self.assertEqual(len(found), count, found)
            if suite == "sid":
                check_readers(self.dest)
            status, _, err = await self.run_command("mirror", "verify", str(self.dest))
            self.assertEqual((status, err), (0, ""))

    async def _test_unpacked_alone(self) -> None:
        archive = self.made(by_hash=False)
        self.serve(archive)
        for path in [each for each in archive.files if each.endswith((".xz", ".gz"))]:
            del archive.files[path]
        self.release(archive, {BINARY: archive.packages_text()})
        await self.mirrored(count=20)

    def test_unpacked_alone(self) -> Deferred[None]:
        """Indexes that are not packed at all."""
        return Deferred.fromCoroutine(self._test_unpacked_alone())

    async def _test_sources_without_md5(self) -> None:
        for kind, function in (("Sha256", sha256), ("Sha512", sha512)):
            archive = self.made(by_hash=False)
            self.serve(archive)
            text = archive.sources_text().decode()
            text = re.sub(r"Files:\n(?: .*\n)+", "", text)
            for data in archive.pool.values():
                text = text.replace(sha256(data).hexdigest(), function(data).hexdigest())
            text = text.replace("Checksums-Sha256", f"Checksums-{kind}")
            index = {BINARY: archive.packages_text(), SOURCES: text.encode()}
            packed = {f"{path}.gz": gzip.compress(data, mtime=0) for path, data in index.items()}
            self.release(archive, {**index, **packed})
            self.dest = self.dest.with_name(kind).joinpath("x")
            await self.mirrored("--source", count=26)

    def test_sources_without_md5(self) -> Deferred[None]:
        """Sources that are proven by one new hash alone."""
        return Deferred.fromCoroutine(self._test_sources_without_md5())

    async def _test_empty(self) -> None:
        archive = self.made(by_hash=True)
        self.serve(archive)
        empty = "empty/binary-amd64/Packages"
        named = {
            path.removeprefix(f"{SUITE}/"): data
            for path, data in archive.files.items()
            if re.search(r"(Packages|Sources)\.[gx]z$", path)
        }
        named |= {empty: b"", f"{empty}.gz": gzip.compress(b"", mtime=0)}
        self.release(archive, named)
        for path, data in named.items():
            above = path.rpartition("/")[0]
            archive.files[f"{SUITE}/{above}/by-hash/SHA256/{sha256(data).hexdigest()}"] = data
        await self.mirrored("--component=main", "--component=empty", count=20)

    def test_empty(self) -> Deferred[None]:
        """A component whose index names nothing, and has no bytes."""
        return Deferred.fromCoroutine(self._test_empty())

    async def _test_names(self) -> None:
        names = (
            "a_1%3a2.0_amd64.deb",
            "b c_1_amd64.deb",
            "d#1?x_1_amd64.deb",
            "é_1_amd64.deb",
            "e;f&g_1_x.deb",
        )
        archive = Archive(
            self.signer,
            packages={f"pool/{name}": name.encode() for name in names},
            now=datetime.now(timezone.utc),
        )
        self.serve(archive)
        await self.mirrored("--component=main", count=len(names))

    def test_names(self) -> Deferred[None]:
        """Names with percent signs (epochs), blanks, and what has a meaning in URLs."""
        return Deferred.fromCoroutine(self._test_names())

    async def _test_two_generations(self) -> None:
        archive = self.made()
        old = dict(archive.files)
        archive.add()
        archive.publish()
        for mixed in ("Release", "InRelease"):
            self.serve(archive)
            archive.files = {**archive.files, **old} if mixed == "all" else dict(archive.files)
            archive.files[f"{SUITE}/{mixed}"] = old[f"{SUITE}/{mixed}"]
            for path, data in old.items():
                archive.files.setdefault(path, data)
            self.dest = self.dest.with_name(mixed).joinpath("x")
            await self.mirrored("--component=main", count=20 if mixed == "InRelease" else 21)

    def test_two_generations(self) -> Deferred[None]:
        """A mirror in the middle of its own update: Release and InRelease differ."""
        return Deferred.fromCoroutine(self._test_two_generations())

    async def _test_by_hash(self) -> None:
        for value in ("true", "1", "On", "with", "enable", "YES"):
            archive = self.made()
            self.serve(archive)
            text = archive.files[f"{SUITE}/Release"].replace(
                b"-Hash: yes", f"-Hash: {value}".encode()
            )
            for path in list(archive.files):
                if re.search(r"(Packages|Sources)\.[gx]z$", path):
                    del archive.files[path]
            archive.files[f"{SUITE}/Release"] = text
            archive.files[f"{SUITE}/InRelease"] = self.signer.inline(text)
            archive.files[f"{SUITE}/Release.gpg"] = self.signer.detached(text)
            self.dest = self.dest.with_name(value).joinpath("x")
            await self.mirrored("--component=main", count=20)
            self.assertTrue(list(self.dest.rglob("by-hash")), value)

    def test_by_hash(self) -> Deferred[None]:
        """Indexes that are there by their hashes alone, which the release file says in words of apt's."""
        return Deferred.fromCoroutine(self._test_by_hash())

    async def _test_flat(self) -> None:
        for directory in ("", "ubuntu2204/"):
            archive = FlatArchive(self.signer, directory=directory)
            self.serve(archive)
            place = f"{directory}Release"
            lines = archive.files[place].decode().split("\n")
            dropped = re.compile("(Components|Architectures|Suite|Codename|Origin|Label):")
            text = "\n".join(line for line in lines if not dropped.match(line)).encode()
            archive.files[place] = text
            archive.files[f"{directory}InRelease"] = self.signer.inline(text)
            archive.files[f"{place}.gpg"] = self.signer.detached(text)
            self.dest = self.dest.with_name(directory.strip("/") or "top").joinpath("x")
            await self.mirrored(count=5, suite=directory or "/")

    def test_flat(self) -> Deferred[None]:
        """Flat archives whose release files name neither architectures nor components."""
        return Deferred.fromCoroutine(self._test_flat())


class RpmReportTests(RpmCase):
    """RPM repositories."""

    def setUp(self) -> None:
        super().setUp()
        self.key = f"{self.signer.home}/secret.asc"
        with open(self.key, "wb") as file:
            file.write(self.signer._gpg("--armor", "--export-secret-keys"))

    async def mirrored(self, count: int, named: int) -> None:
        """Mirror it as it is, and with new indexes; each time so many packages are there, and named."""
        for further in ((), ("--reindex", "--sign-with", self.key)):
            self.dest = self.dest.with_name(f"dest-{len(further)}")
            status, _, err = await self.run_command(*self.arguments(*further))
            self.assertEqual(status, 0, err)
            there = [path for path in self.found() if path.endswith(".rpm")]
            self.assertEqual((len(there), self.check_readers()), (count, named))
            status, _, err = await self.run_command("mirror", "verify", str(self.dest))
            self.assertEqual((status, err), (0, ""))

    async def _test_no_filelists(self) -> None:
        archive = RpmArchive(self.signer, count=3)
        self.serve(archive)
        rows = re.findall("<data type=.*?</data>", archive.files[REPOMD].decode(), re.DOTALL)
        archive.set_repomd("\n".join(row for row in rows if 'type="primary"' in row))
        await self.mirrored(3, 3)

    def test_no_filelists(self) -> Deferred[None]:
        """Repositories that have no lists of files."""
        return Deferred.fromCoroutine(self._test_no_filelists())

    async def _test_twice(self) -> None:
        archive = RpmArchive(self.signer, count=2)
        first = archive.packages[0]
        archive.packages.append(type(first)(first.name, first.data, path="other/place.rpm"))
        archive.packages.append(type(first)(first.name, first.data))
        archive.publish()
        self.serve(archive)
        await self.mirrored(3, 4)

    def test_twice(self) -> Deferred[None]:
        """One package at two places, and named twice at one."""
        return Deferred.fromCoroutine(self._test_twice())

    async def _test_other_orders(self) -> None:
        archive = RpmArchive(self.signer, count=3)
        ids = [sha256(each.data).hexdigest() for each in archive.packages]
        lists = '<filelists xmlns="x" packages="9">\n' + "".join(
            f'<package pkgid="{each}" name="x" arch="y"><version ver="1"/></package>'
            for each in [ids[2], "0" * 64, ids[0]]
        )
        packed = PACKERS[".zst"](f"{lists}</filelists>".encode())
        archive.files["repodata/lists.xml.zst"] = packed
        row = f'<checksum type="SHA256">{sha256(packed).hexdigest()}</checksum><size>{len(packed)}</size>'
        kinds = ("group", "group_gz", "updateinfo")
        more = "".join(
            f'<data type="{kind}"><checksum type="sha256">{sha256(kind.encode()).hexdigest()}</checksum>'
            f'<size>{len(kind)}</size><location href="repodata/{kind}"/></data>'
            for kind in kinds
        )
        archive.files.update({f"repodata/{kind}": kind.encode() for kind in kinds})
        rows = re.findall("<data type=.*?</data>", archive.files[REPOMD].decode(), re.DOTALL)
        rows = [each for each in rows if 'type="primary"' in each]
        archive.set_repomd(
            f'{rows[0]}<data type="filelists">{row}<location href="repodata/lists.xml.zst"/></data>{more}'
        )
        self.serve(archive)
        await self.mirrored(3, 3)
        self.assertTrue(set(self.found()) >= {f"repodata/{kind}" for kind in kinds})

    def test_other_orders(self) -> Deferred[None]:
        """Lists of files in another order, that lack a package, and name one that is none; groups twice."""
        return Deferred.fromCoroutine(self._test_other_orders())

    async def _test_names(self) -> None:
        archive = RpmArchive(self.signer, count=0)
        for number, name in enumerate(("a%20b.rpm", "c d.rpm", "e+f~1^2.rpm", "g#h?.rpm", "é.rpm")):
            archive.add(f"n{number}", path=f"P/{name}")
        archive.publish()
        self.serve(archive)
        await self.mirrored(5, 5)

    def test_names(self) -> Deferred[None]:
        """Names with percent signs, blanks, carets, and what has a meaning in URLs."""
        return Deferred.fromCoroutine(self._test_names())
