"""``pipegrid mirror`` with filters: what is fetched, what stays, and what matches nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import Any
from unittest.mock import patch

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from pipegrid.mirror import package_filter
from pipegrid.mirror.archive_file import MirrorError
from pipegrid.mirror.debian_archive import DebianArchive
from pipegrid.mirror.destination import Destination
from tests.cli.test_mirror_debian import DebianCase
from tests.cli.test_mirror_rpm import RpmCase
from tests.mirror.archive import Archive
from tests.mirror.rpmarchive import RpmArchive

SECTIONS = ("libs", "net", "debug")


class SortedArchive(Archive):
    """Packages p1 to p20 have sections in turn; p1 is of the source s21, p2 required, p3 there twice."""

    def packages_text(self) -> bytes:
        paragraphs = super().packages_text().decode().split("\n\n")
        found = []
        for each in paragraphs[:-1]:
            number = int(each.partition("\n")[0].removeprefix("Package: p"))
            more = f"Section: {SECTIONS[number % 3]}\nPriority: {'required' if number == 2 else 'optional'}\n"
            if number == 1:
                more += "Source: s21 (1)\n"
            if number == 4:
                each = each.replace("Package: p4\n", "Package: p3\n").replace(
                    "Version: 1~rc1+b4", "Version: 10"
                )
            found.append(f"{each}\n{more}\n")
        return "".join(found).encode()


class DebianFilterCase(DebianCase):
    """A Debian archive, a part of which is wanted."""

    def setUp(self) -> None:
        super().setUp()
        self.signer_archive = SortedArchive(self.signer, now=self.made().date)
        self.serve(self.signer_archive)

    async def run_json(self, *options: str) -> tuple[int, dict[str, Any], str]:
        """Run it; returns the status, what is said in JSON, and on stderr."""
        status, out, err = await self.run_command(*self.arguments("--json", *options))
        return status, json.loads(out) if out else {}, err

    def packages(self) -> list[str]:
        """The names of the files of packages and sources that are there."""
        return sorted(
            path.rpartition("/")[2].partition("_")[0] for path in self.found() if "pool/" in path
        )


class DebianFilterTests(DebianFilterCase):
    """Which packages are fetched, and which go."""

    async def _test_each(self) -> None:
        for options, names in (
            (
                ("--include=p1", "--include=p1?", "--exclude=p12"),
                "p1 p10 p11 p13 p14 p15 p16 p17 p18 p19",
            ),
            (("--section=libs", "--include=p?"), "p3 p6 p9"),
            (("--priority=required",), "p2"),
            (("--include=p3", "--newest=1"), "p4"),
            (("--include=p3", "--newest=2"), "p3 p4"),
            (("--include=p[12]", "--sources"), "p1 p2 s21 s21"),
            (("--include=p2", "--include=s22", "--source"), "p2 s22 s22"),
        ):
            status, told, err = await self.run_json(*options, "--delete-excluded")
            self.assertEqual((status, self.packages()), (0, names.split()), (options, err))
            self.assertEqual(told["files"], len(names.split()))
            status, _, _ = await self.run_command("mirror", "verify", str(self.dest))
            self.assertEqual(status, 0)

    def test_each(self) -> Deferred[None]:
        """Each filter alone, and with others; ``verify`` wants what the last one did."""
        return Deferred.fromCoroutine(self._test_each())

    async def _test_runs_share(self) -> None:
        for options in (("--include=p1",), ("--include=p2",), ("--include=p2", "--delete")):
            status, _, err = await self.run_json(*options)
            self.assertEqual(status, 0, err)
        self.assertEqual(self.packages(), ["p1", "p2"])
        self.assertIn("files that filters of earlier runs select are kept", err)
        new = self.archive.add()
        self.archive.drop(min(path for path in self.archive.pool if "/p1_" in path))
        self.archive.publish()
        for _ in range(2):  # what the generation before names stays for one more
            status, told, err = await self.run_json("--include=p2", "--delete")
        self.assertEqual((status, self.packages(), new in self.found()), (0, ["p2"], False), err)
        status, _, err = await self.run_json("--include=p5")
        status, told, err = await self.run_json("--include=p2", "--delete-excluded")
        self.assertEqual((status, self.packages(), told["removed"]), (0, ["p2"], 1), err)

    def test_runs_share(self) -> Deferred[None]:
        """A run removes what no filter of any run selects, and others' files only on request."""
        return Deferred.fromCoroutine(self._test_runs_share())

    async def _test_other_versions_go(self) -> None:
        self.assertEqual((await self.run_json("--include=p3"))[0], 0)
        self.assertEqual(self.packages(), ["p3", "p4"])
        status, told, err = await self.run_json("--include=p3", "--newest=1", "--delete")
        self.assertEqual((status, told["removed"], self.packages()), (0, 1, ["p4"]), err)

    def test_other_versions_go(self) -> Deferred[None]:
        """The same packages in fewer versions are the same run's, so that old ones go."""
        return Deferred.fromCoroutine(self._test_other_versions_go())

    async def _test_unmatched(self) -> None:
        self.assertEqual((await self.run_json())[0], 0)
        before = self.packages()
        for options, words, status in (
            (("--include=p1", "--include=nosuch*"), "--include 'nosuch*' matches no package", 1),
            (("--exclude=nosuch",), "--exclude 'nosuch' matches no package", 1),
            (
                ("--section=nosuch", "--section=libs"),
                "--section 'nosuch' matches no section of a",
                1,
            ),
            (("--include=nosuch",), "the filters select none of 20 packages", 1),
            (("--include=p1", "--section=libs"), "the filters select none of 20 packages", 1),
        ):
            done = await self.run_command("-q", *self.arguments(*options, "--delete-excluded"))
            self.assertEqual((done[0], self.packages()), (status, before), options)
            self.assertIn(words, done[2])

    def test_unmatched(self) -> Deferred[None]:
        """What matches nothing is named, also to who wants quiet; nothing is removed then."""
        return Deferred.fromCoroutine(self._test_unmatched())

    async def _test_damaged_records(self) -> None:
        for data in (b"{", b"[]", b'{"a": 1}', b'{"a": [{"x": 1}]}', b'{"a": [{"newest": -1}]}'):
            (self.dest / ".pipegrid-mirror").mkdir(parents=True, exist_ok=True)
            (self.dest / ".pipegrid-mirror" / "filters").write_bytes(data)
            status, _, err = await self.run_json("--include=p1")
            self.assertEqual((status, self.packages()), (0, ["p1"]), err)

    def test_damaged_records(self) -> Deferred[None]:
        """Records that nobody can read count as none."""
        return Deferred.fromCoroutine(self._test_damaged_records())


def full_for(name: str) -> Any:
    """Return what writes files of the mirror's own, but for one, for which the disk is full."""
    keep = Destination.keep_own

    def keep_own(self: Destination, path: str, data: bytes) -> None:
        if path == name:
            raise self.error(OSError(errno.ENOSPC, "full"), "record its files")
        keep(self, path, data)

    return patch.object(Destination, "keep_own", keep_own)


class DebianRecordTests(DebianFilterCase):
    """The records of filters, and what happens to them."""

    async def _test_full_disk(self) -> None:
        await self.run_json("--include=p1")
        before = {path: (self.dest / path).read_bytes() for path in self.found()}
        self.archive.publish()
        with full_for("filters"):
            status, _, err = await self.run_json("--include=p2")
        self.assertEqual(status, 1)
        self.assertIn("the disk is full; free some space and run it again", err)
        after = {path: (self.dest / path).read_bytes() for path in before}
        self.assertEqual(after, before)  # nothing was published that no record is of
        await self.run_json("--include=p2")
        with patch.object(DebianArchive, "_publish", side_effect=MirrorError("stopped")):
            status, _, err = await self.run_json("--include=p3", "--newest=1")
        self.assertEqual(status, 1)
        status, _, _ = await self.run_json("--include=p2", "--delete")
        self.assertEqual((status, self.packages()), (0, ["p1", "p2", "p4"]))

    def test_full_disk(self) -> Deferred[None]:
        """Records are written before anything is published; a run that ends then loses nothing to another."""
        return Deferred.fromCoroutine(self._test_full_disk())

    async def _test_too_many(self) -> None:
        for number in range(1, 4):
            await self.run_json(f"--include=p{number}")
        with patch.object(package_filter, "MAX_RECORDED", 3):
            status, _, err = await self.run_json("--include=p5", "--delete")
            self.assertEqual((status, self.packages()), (1, ["p1", "p2", "p3", "p4", "p5"]))
            self.assertIn("more than 3 different filters", err)
            status, _, err = await self.run_json("--include=p5", "--delete-excluded")
            self.assertEqual((status, self.packages()), (0, ["p5"]), err)

    def test_too_many(self) -> Deferred[None]:
        """With more filters than are recorded, none is forgotten without a word."""
        return Deferred.fromCoroutine(self._test_too_many())

    async def _test_clock(self) -> None:
        await self.run_json("--include=p1")
        record = self.dest / ".pipegrid-mirror" / "filters"
        for moment in (0, 1 << 32):
            os.utime(record, (moment, moment))
            os.utime(self.dest / "dists/sid/InRelease", (moment, moment))
            status, _, _ = await self.run_json("--include=p2", "--delete")
            self.assertEqual((status, self.packages()), (0, ["p1", "p2"]))

    def test_clock(self) -> Deferred[None]:
        """Times of files say nothing."""
        return Deferred.fromCoroutine(self._test_clock())

    async def _test_two_at_once(self) -> None:
        programs = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pipegrid",
                    *self.arguments(f"--include={name}", "--wait=60"),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for name in ("p1", "p2", "p5", "p6")
        ]
        for program in programs:
            _, err = await deferToThread(program.communicate, timeout=120)
            self.assertEqual(program.returncode, 0, err)
        status, _, _ = await self.run_json("--include=p1", "--delete")
        self.assertEqual((status, self.packages()), (0, ["p1", "p2", "p5", "p6"]))

    def test_two_at_once(self) -> Deferred[None]:
        """Processes that begin together: each waits for the others, and its filters are recorded."""
        return Deferred.fromCoroutine(self._test_two_at_once())


class RpmFilterTests(RpmCase):
    """An RPM repository, a part of which is wanted."""

    def setUp(self) -> None:
        super().setUp()
        archive = RpmArchive(self.signer, count=3)
        archive.add("p0", "0", "2", "1")
        archive.add("p0", "0", "3", "1")
        archive.add("other", "0", "1", "1", arch="noarch")
        archive.publish()
        self.serve(archive)

    async def _test_each(self) -> None:
        for options, count in (
            (("--include=p*", "--exclude=p1"), 4),
            (("--arch=noarch",), 1),
            (("--include=p0", "--newest=2"), 2),
            (("--newest=1",), 4),
            (("--newest-only", "--include=p?"), 3),
        ):
            status, out, err = await self.run_command(
                *self.arguments("--json", "--delete-excluded", *options)
            )
            told = json.loads(out)
            there = [path for path in self.found() if not path.startswith("repodata/")]
            self.assertEqual((status, told["files"], len(there)), (0, count, count), (options, err))

    def test_each(self) -> Deferred[None]:
        """Each filter alone, and with others."""
        return Deferred.fromCoroutine(self._test_each())

    async def _test_sources(self) -> None:
        archive = self.archive
        for number, name in enumerate(("p0-1-1.src.rpm", "many-2-1.src.rpm", "many-2-1.src.rpm")):
            archive.packages[number].source = name
        archive.add("p0", arch="src")
        archive.add("many", "0", "2", "1", arch="src")
        archive.add("unwanted", arch="src")
        archive.publish()
        for options, names in (
            (("--include=p0", "--newest=1"), "p0-1 p0-3"),
            (
                ("--include=p[01]", "--exclude=other", "--sources"),
                "many-2 p0-1 p0-1 p0-2 p0-3 p1-1",
            ),
            (("--include=p[12]", "--arch=x86_64", "--sources"), "many-2 p1-1 p2-1"),
            (("--arch=noarch", "--sources"), "other-1"),
        ):
            status, _, err = await self.run_command(*self.arguments("--delete-excluded", *options))
            there = sorted(
                path.rpartition("/")[2].rpartition("-")[0]
                for path in self.found()
                if path.endswith(".rpm")
            )
            self.assertEqual((status, " ".join(there)), (0, names), err)
            self.assertNotIn("lacks", err)
        archive.packages = [each for each in archive.packages if each.name != "many"]
        archive.publish()
        status, _, err = await self.run_command(*self.arguments("--include=p1", "--sources"))
        self.assertEqual(status, 0)
        self.assertIn(
            "this repository lacks the sources (src.rpm) of selected packages, 1 file;", err
        )

    def test_sources(self) -> Deferred[None]:
        """Packages of sources of those that are selected, whatever their names; those lacking are counted."""
        return Deferred.fromCoroutine(self._test_sources())

    async def _test_unmatched(self) -> None:
        status, _, err = await self.run_command(*self.arguments("--arch=ppc64", "--include=p1"))
        self.assertEqual((status, self.found()), (1, {}))
        self.assertIn("the filters select none of 6 packages", err)
        status, _, err = await self.run_command(*self.arguments("--include=x", "--include=p1"))
        self.assertEqual((status, len(self.found())), (1, 6))
        self.assertIn("--include 'x' matches no package", err)

    def test_unmatched(self) -> Deferred[None]:
        """What matches nothing is named."""
        return Deferred.fromCoroutine(self._test_unmatched())
