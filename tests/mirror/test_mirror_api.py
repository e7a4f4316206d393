"""Bringing a directory up to date, whatever the mirrors do: in virtual time, every byte looked at."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

from twisted.internet.defer import CancelledError
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.http11 import host_pool as host_module
from pipegrid.mirror.archive_file import BadEntry, MirrorError, wanted
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.file_scheduler import Report
from pipegrid.mirror.hash_cache import LIBREPO, is_noted_by_librepo
from pipegrid.mirror.local_check import MirrorEntry
from pipegrid.mirror.mirror_api import Mirror
from pipegrid.mirror.mirror_urls import parse_url, target_of
from pipegrid.mirror.twisted_driver import FileExchange
from pipegrid.testing.network import leaks
from tests.mirror.world import MirrorWorld, ok

KB = 1000


def archive(seed: int = 1, count: int = 60, largest: int = 300 * KB) -> dict[str, bytes]:
    """Many small files and a few large ones."""
    rng = random.Random(seed)
    sizes = [rng.randrange(3000) for _ in range(count)] + [largest, largest // 2, 0]
    return {
        f"pool/{number % 7}/dir {number % 3}/file{number}.deb": rng.randbytes(size)
        for number, size in enumerate(sizes)
    }


class LibrepoTests(SynchronousTestCase):
    """What librepo notes of files."""

    def test_attributes(self) -> None:
        """Its hash counts if it is the one that is wanted, and the time is the file's to the nanosecond."""
        data = b"data"
        good = wanted("a", 4, {"sha256": sha256(data).digest()})
        path = self.mktemp()
        with open(path, "wb") as file:
            file.write(data)
        status = os.stat(path)
        try:
            os.setxattr(path, LIBREPO + "sha256", sha256(data).hexdigest().encode())
        except OSError:
            return  # this file system has none, and so librepo has none
        with open(path, "rb") as file:
            fd = file.fileno()
            self.assertFalse(is_noted_by_librepo(fd, good, status))
            for time, digest, expected in (
                (status.st_mtime_ns, data, True),
                (status.st_mtime_ns + 1, data, False),
                (status.st_mtime_ns // 10**9, data, False),
                (status.st_mtime_ns, b"other", False),
            ):
                os.setxattr(path, LIBREPO + "mtime", b"%d" % time)
                os.setxattr(path, LIBREPO + "sha256", sha256(digest).hexdigest().encode())
                self.assertEqual(is_noted_by_librepo(fd, good, status), expected)


class MirrorCase(SynchronousTestCase):
    """A world."""

    def make(
        self, hosts: int = 1, files: dict[str, bytes] | None = None, **options: Any
    ) -> MirrorWorld:
        """Begin anew."""
        self.world = MirrorWorld(
            self.mktemp(), archive() if files is None else files, hosts, **options
        )
        return self.world

    def assert_complete(self) -> None:
        """Everything is there, and nothing else; nothing is left beside it."""
        self.assertEqual(self.world.found(), self.world.files)
        incoming = self.world.directory / ".pipegrid-mirror" / "incoming"
        self.assertEqual(list(incoming.iterdir()), [])


class OrdinaryTests(MirrorCase):
    """Nothing goes wrong."""

    def test_all_of_it(self) -> None:
        """Each file is asked for once, and is there."""
        world = self.make()
        report = world.sync()
        self.assert_complete()
        self.assertEqual(set(world.hosts[0].requests.values()), {1})
        self.assertEqual(report.fetched_files, len(world.files))
        self.assertEqual(report.fetched_bytes, sum(map(len, world.files.values())))
        self.assertEqual((report.failed_files, report.retries), (0, 0))

    def test_a_few_round_trips(self) -> None:
        """Sixty files take a few round trips, not sixty."""
        world = self.make(latency_s=0.1)
        report = world.sync()
        self.assertLess(report.elapsed_s, 6 * 0.2)

    def test_again(self) -> None:
        """What is there is not asked for, nor read; what was lost or changed is asked for."""
        world = self.make()
        world.sync()
        world.sync()
        self.assertEqual(world.asked(), len(world.files))
        paths = sorted(path for path in world.files if world.files[path])
        (world.directory / paths[0]).unlink()
        (world.directory / paths[1]).write_bytes(b"x" * len(world.files[paths[1]]))
        (world.directory / paths[2]).write_bytes(b"short")
        report = world.sync()
        self.assertEqual(report.fetched_files, 3)
        self.assertEqual(world.asked(), len(world.files) + 3)
        self.assert_complete()

    def test_a_change_that_hides(self) -> None:
        """Bytes changed under the same size and time are found by who is paranoid, or samples all."""
        for options in ({"paranoid": True}, {"sample": 1.0}):
            world = self.make()
            world.sync()
            path = world.directory / max(world.files, key=lambda name: len(world.files[name]))
            times = path.stat()
            with path.open("r+b") as file:
                file.write(b"changed")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            self.assertEqual(world.sync().fetched_files, 0)
            self.assertEqual(world.sync(**options).fetched_files, 1)
            self.assert_complete()

    def test_what_a_disk_does_not_give_back(self) -> None:
        """Is fetched again, a file that is there as well as one that a killed run left."""
        world = self.make()
        world.sync()
        there, left = sorted(world.files, key=lambda name: len(world.files[name]))[-2:]
        incoming = world.directory / ".pipegrid-mirror" / "incoming"
        (world.directory / left).rename(incoming / f"{sha256(world.files[left]).hexdigest()}.1")
        bad = {(world.directory / there).stat().st_ino, next(incoming.iterdir()).stat().st_ino}
        real = os.preadv

        def preadv(fd: int, *arguments: Any) -> int:
            if os.fstat(fd).st_ino in bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, *arguments)

        with patch.object(os, "preadv", preadv):
            self.assertEqual(world.sync(paranoid=True).fetched_files, 2)
        self.assert_complete()

    def test_indexes_may_come_slowly(self) -> None:
        """Files are asked for while the entries are still being read; each once, if named twice."""
        world = self.make(files=archive(count=700))
        seen_before_the_end = []

        def entries() -> Iterator[MirrorEntry]:
            for entry in world.entries() * 2:
                yield entry
                seen_before_the_end.append(world.asked())

        world.sync(entries())  # type: ignore[arg-type]
        self.assert_complete()
        self.assertEqual(set(world.hosts[0].requests.values()), {1})

    def test_durable(self) -> None:
        """With every policy the files are the same."""
        for policy in ("none", "batch", "strict"):
            self.make()
            self.world.sync(durability=policy)
            self.assert_complete()

    def test_a_limit(self) -> None:
        """No more than so many bytes a second, and all of it."""
        world = self.make(files=archive(largest=8000 * KB))
        total = sum(map(len, world.files.values()))
        report = world.sync(limit_bytes_per_s=total / 5)
        self.assert_complete()
        self.assertGreater(report.elapsed_s, 4)
        self.assertLess(report.elapsed_s, 6)

    def test_several_share_the_work(self) -> None:
        """Three mirrors on narrow lines are nearly three times as fast as one."""
        times = []
        for hosts in (1, 3):
            world = self.make(hosts)
            for host in world.hosts:
                host.bytes_per_s = 50 * KB
            times.append(world.sync(connections=1).elapsed_s)
            self.assert_complete()
        self.assertGreater(times[0] / times[1], 2)


class FaultTests(MirrorCase):
    """Mirrors that fail; the files come all the same, and never a wrong one."""

    def test_connections_that_end(self) -> None:
        """Announced after every so many answers: nothing is lost, and nothing counts as a failure."""
        for answers in (1, 3, 100):
            world = self.make()
            world.hosts[0].closes_after = answers
            report = world.sync()
            self.assert_complete()
            self.assertEqual(report.retries, 0, answers)

    def test_how_much_a_connection_carries(self) -> None:
        """As many answers as are usual: nothing is asked in vain; of fewer, only on the first connection."""
        self.patch(host_module, "FIRST_QUOTA", 100.0)
        files = {f"pool/{number:04}": b"%d" % number for number in range(350)}
        made = FileExchange.__init__
        for answers, most in ((100, 350), (5000, 350), (50, 350 + 50)):
            world = self.make(files=files)
            host = world.hosts[0]
            host.closes_after = answers
            asked = 0

            def look(self: FileExchange, *arguments: Any, **options: Any) -> None:
                nonlocal asked
                asked += 1
                made(self, *arguments, **options)

            self.patch(FileExchange, "__init__", look)
            world.sync(connections=1)
            self.patch(FileExchange, "__init__", made)
            self.assert_complete()
            self.assertLessEqual(asked, most, answers)
            if answers == 5000:
                self.assertEqual(host.connections, 1)

    def test_connections_that_break(self) -> None:
        """Resets in the middle of files."""
        world = self.make(2)
        for host in world.hosts:
            host.breaks_after = 400 * KB
        world.sync()
        self.assert_complete()

    def test_missing_files(self) -> None:
        """What one mirror lacks comes from another, with one retry each."""
        world = self.make(3)
        lacking = sorted(world.files)[::9]
        world.hosts[1].files = {p: d for p, d in world.files.items() if p not in lacking}
        report = world.sync()
        self.assert_complete()
        self.assertLessEqual(report.retries, len(lacking))
        self.assertEqual(report.tallies[1].refused, report.retries)

    def test_missing_everywhere(self) -> None:
        """It is named with every mirror's reason, and all the others come."""
        world = self.make(2)
        path = min(world.files)
        for host in world.hosts:
            host.files = {p: d for p, d in world.files.items() if p != path}
        report = world.sync()
        self.assertEqual(report.failed_files, 1)
        ((failed, why),) = report.failed
        self.assertEqual(failed, path)
        self.assertEqual(why.count("it answers 404"), 2)
        del world.files[path]
        self.assert_complete()

    def test_wrong_contents(self) -> None:
        """Other bytes, other lengths, short bodies, a page for everything: never under a final name."""
        for wrong in (
            lambda data: ok(bytes(len(data)) + b"!"),
            lambda data: ok(b"<html>Please log in</html>"),
            lambda data: ok(data[:-1] + bytes([data[-1] ^ 1])) if data else ok(b"x"),
            lambda data: ok(data)[:-7] if len(data) > 7 else ok(b"eight ch"),
            lambda data: b"HTTP/1.1 302 Found\r\nLocation: ftp://m0/\r\nContent-Length: 0\r\n\r\n",
            lambda data: (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwrong\r\n0\r\n\r\n"
            ),
        ):
            world = self.make(2)
            files = world.files
            world.hosts[0].answer = lambda path, wrong=wrong, files=files: wrong(files[path])  # type: ignore[misc]
            report = world.sync()
            self.assert_complete()
            self.assertEqual(report.tallies[0].files, 0)
        world = self.make(1)
        world.hosts[0].answer = lambda path: ok(b"<html>Please log in</html>")
        report = world.sync()
        self.assertEqual(report.failed_files, len(world.files))
        self.assertEqual(world.found(), {})

    def test_unknown_length(self) -> None:
        """Chunked answers are as good as others if they are right."""
        world = self.make()
        files = world.files
        world.hosts[0].answer = lambda path: (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            + (b"%x\r\n%s\r\n" % (len(files[path]), files[path]) if files[path] else b"")
            + b"0\r\n\r\n"
        )
        world.sync()
        self.assert_complete()

    def test_a_mirror_that_stalls(self) -> None:
        """Its work is withdrawn after a second, and it costs three at most."""
        undisturbed = self.make(3).sync().elapsed_s
        world = self.make(3)
        world.hosts[1].answer = lambda path: b""
        report = world.sync()
        self.assert_complete()
        self.assertLess(report.elapsed_s, undisturbed + 3)
        self.assertEqual(report.tallies[1].files, 0)

    def test_the_only_mirror_stalls_for_a_while(self) -> None:
        """Then it is waited for longer, and asked again."""
        world = self.make(1)
        world.hosts[0].answer = lambda path: b"" if world.clock.seconds() < 10 else None
        report = world.sync()
        self.assert_complete()
        self.assertLess(report.elapsed_s, 40)

    def test_a_mirror_that_dies(self) -> None:
        """Refused connections: the others do its work, and it is given up."""
        world = self.make(2)
        world.network.host("m1").crash()
        report = world.sync()
        self.assert_complete()
        self.assertEqual(report.tallies[1].files, 0)

    def test_a_slow_mirror(self) -> None:
        """At 20 KB/s it does what it can, and the others take its tail: three seconds more at most."""
        undisturbed = self.make(4).sync().elapsed_s
        world = self.make(4)
        world.hosts[2].bytes_per_s = 20 * KB
        report = world.sync()
        self.assert_complete()
        self.assertLess(report.elapsed_s, undisturbed + 3)

    def test_busy(self) -> None:
        """503 is not the file's fault: the mirror rests, and is asked again."""
        world = self.make(1)
        world.hosts[0].answer = lambda path: (
            ok(b"busy", status=b"503 Busy") if world.clock.seconds() < 1 else None
        )
        report = world.sync()
        self.assert_complete()
        self.assertEqual(report.failed_files, 0)
        self.assertLess(report.elapsed_s, 20)

    def test_too_much_at_once(self) -> None:
        """A mirror that answers so many requests a second, and 503 or 429 to others, gives all in the end."""
        for status in (b"503 Busy", b"429 Too Many Requests"):
            world = self.make(1)
            answered: list[float] = []

            def limited(
                path: str,
                world: MirrorWorld = world,
                answered: list[float] = answered,
                status: bytes = status,
            ) -> bytes | None:
                now_s = world.clock.seconds()
                if len([at_s for at_s in answered if at_s > now_s - 0.4]) >= 8:
                    return ok(b"slowly", status=status)
                answered.append(now_s)
                return None

            world.hosts[0].answer = limited
            report = world.sync()
            self.assert_complete()
            self.assertEqual((report.failed_files, report.tallies[0].given_up), (0, None))

    def test_retry_after(self) -> None:
        """A mirror that says when it wants to be asked again is left alone until then, or for two minutes."""
        for told, pause_s in ((b"40", 40), (b"86400", 120), (b"Wed, 21 Oct 2026 07:28:00 GMT", 0)):
            world = self.make(1)
            asked: list[float] = []

            def busy(
                path: str,
                world: MirrorWorld = world,
                asked: list[float] = asked,
                told: bytes = told,
                pause_s: float = pause_s,
            ) -> bytes | None:
                asked.append(world.clock.seconds())
                if asked[-1] < asked[0] + max(pause_s, 0.1):
                    return ok(b"later", b"Retry-After: " + told, status=b"503 Busy")
                return None

            world.hosts[0].answer = busy
            self.assertEqual(world.sync().failed_files, 0)
            self.assert_complete()
            again_s = min(at_s for at_s in asked if at_s > asked[0] + 0.3) - asked[0]
            self.assertLess(abs(again_s - max(pause_s, 0.5)), 0.3, told)

    def test_what_is_refused_for_ever(self) -> None:
        """A file for which a mirror has no time, ever, has failed; all others come."""
        world = self.make(1)
        lost = min(world.files)
        world.hosts[0].answer = lambda path: (
            ok(b"busy", status=b"503 Busy") if path == lost else None
        )
        report = world.sync()
        self.assertEqual([path for path, _ in report.failed], [lost])
        self.assertIn("it answers 503", report.failed[0][1])
        self.assertEqual(world.found(), {k: v for k, v in world.files.items() if k != lost})
        self.assertLess(report.elapsed_s, 120)

    def test_a_plus_sign(self) -> None:
        """It is escaped, since stores such as S3 take one that is not for a blank."""
        self.assertEqual(
            target_of(parse_url("http://a/x+y"), "pool/g++/g++_1+b1~x_all.deb"),
            b"/x+y/pool/g%2B%2B/g%2B%2B_1%2Bb1~x_all.deb",
        )
        self.assertEqual(target_of(parse_url("http://a"), "a+b c%2B"), b"/a%2Bb%20c%252B")

    def test_a_mirror_within(self) -> None:
        """A directory below that is another mirror's is no part of this one: nothing of it is removed."""
        world = self.make(1)
        world.sync()
        inner = world.directory / "pool/other/file"
        with closing(Destination(str(inner.parent))):
            inner.write_bytes(b"another mirror's")
        (world.directory / "pool/stray").write_bytes(b"x")
        before = {path for path in world.directory.rglob("*") if path.is_file()}
        with closing(Destination(str(world.directory))) as destination:
            self.assertEqual(destination.delete_others(world.files), ["pool/stray"])
        after = {path for path in world.directory.rglob("*") if path.is_file()}
        self.assertEqual({str(path.name) for path in before - after}, {"stray"})

    def test_none_can_be_reached(self) -> None:
        """That ends, with the reason."""
        world = self.make(1)
        world.network.host("m0").crash()
        report = world.sync()
        self.assertEqual(report.failed_files, len(world.files))
        self.assertIsNotNone(report.tallies[0].given_up)

    def test_any_mixture(self) -> None:
        """With one good mirror among bad ones everything comes, whatever the others do."""
        for seed in range(60):
            rng = random.Random(seed)
            world = self.make(
                rng.randint(2, 4), archive(seed, 40), latency_s=rng.choice((0.001, 0.05))
            )
            files = world.files
            for host in world.hosts[1:]:
                fate = rng.randrange(7)
                if fate == 0:
                    host.files = {p: d for p, d in files.items() if rng.random() < 0.5}
                elif fate == 1:
                    host.breaks_after = rng.randrange(100, 500 * KB)
                elif fate == 2:
                    host.closes_after = rng.randint(1, 9)
                elif fate == 3:
                    host.bytes_per_s = rng.choice((100, 20 * KB))
                elif fate == 4:
                    dice = random.Random(seed + 1)
                    host.answer = lambda path, dice=dice: b"" if dice.random() < 0.1 else None  # type: ignore[misc]
                elif fate == 5:
                    dice = random.Random(seed + 2)
                    host.answer = lambda path, dice=dice: (  # type: ignore[misc]
                        ok(b"no", status=b"503 No") if dice.random() < 0.3 else None
                    )
                else:
                    host.answer = lambda path: b"garbage\r\n\r\n"
            report = world.sync()
            self.assertEqual(report.failed_files, 0, seed)
            self.assertEqual(world.found(), world.files, seed)


class RefusalTests(MirrorCase):
    """What is not done."""

    def test_bad_entries(self) -> None:
        """One ends the run with a sentence; nothing leads out of the directory."""
        digest = {"sha256": sha256(b"x").digest()}
        for entry, words in (
            (("../x", 1, digest), "leads out"),
            (("/x", 1, digest), "is absolute"),
            (("x", 1, {"md5": "0" * 32}), "weaker"),
        ):
            world = self.make()
            error = self.assertRaises(BadEntry, world.sync, [entry])
            self.assertIn(words, str(error))
            self.assertEqual(world.found(), {})

    def test_two_contents_for_one_path(self) -> None:
        """The index is wrong."""
        world = self.make()
        entries: list[MirrorEntry] = [
            ("x", 1, {"sha256": sha256(data).digest()}) for data in (b"1", b"2")
        ]
        self.assertRaises(BadEntry, world.sync, entries)

    def test_links_are_not_followed(self) -> None:
        """Neither as directories nor as files."""
        outside = self.mktemp()
        os.makedirs(outside)
        for name, target in (("pool", outside), ("pool", os.path.join(outside, "file"))):
            world = self.make(files={"pool/a": b"a"})
            os.makedirs(world.directory)
            os.symlink(os.path.abspath(target), world.directory / name)
            error = self.assertRaises(BadEntry, world.sync)
            self.assertIn("symbolic link", str(error))
            self.assertEqual(os.listdir(outside), [])
        world = self.make(files={"a": b"a"})
        os.makedirs(world.directory)
        os.symlink(os.path.abspath(os.path.join(outside, "file")), world.directory / "a")
        self.assertRaises(BadEntry, world.sync)
        self.assertEqual(os.listdir(outside), [])

    def test_two_at_once(self) -> None:
        """The second says so."""
        world = self.make()
        first = world.mirror()
        error = self.assertRaises(MirrorError, world.mirror)
        self.assertIn("another process is mirroring", str(error))
        self.successResultOf(first.close())
        world.sync()
        self.assert_complete()

    def test_nonsense(self) -> None:
        """Arguments that make no sense are usage errors."""
        world = self.make()
        options: list[dict[str, Any]] = [
            *({"connections": wrong} for wrong in (0, "4", None)),
            *({"sample": wrong} for wrong in (2.0, "1")),
            *({"limit_bytes_per_s": wrong} for wrong in (0.0, "1")),
            {"durability": "bath"},
            {"progress": 3},
        ]
        for each in options:
            self.assertRaises(UsageError, world.mirror, **each)
        url: Any
        for url in (None, "http://a.example/", [b"http://a.example/"]):
            self.assertRaises(UsageError, Mirror, world.clock, url, str(world.directory))
        wrong: Any = None
        self.assertRaises(UsageError, Mirror, world.clock, ["http://a.example/"], wrong)

    def test_no_entries(self) -> None:
        """What is no list of files is a usage error; nothing is asked for."""
        digest = {"sha256": sha256(b"x").digest()}
        wrong: Any
        for wrong in (
            None,
            5,
            "abc",
            [5],
            [("x", 1)],
            [("x", "1", digest)],
            [(Path("x"), 1, digest)],
        ):
            world = self.make()
            mirror = world.mirror()
            self.failureResultOf(mirror.sync(wrong), UsageError)
            self.successResultOf(mirror.close())
            self.assertEqual(world.asked(), 0)

    def test_closed(self) -> None:
        """Closed while it fetches, it ends that as cancelled; whoever asks more of it is told."""
        world = self.make()
        world.hosts[0].bytes_per_s = 100 * KB
        mirror = world.mirror()
        syncing = mirror.sync(world.entries())
        world.clock.pump([0.1] * 10)
        self.successResultOf(mirror.close())
        self.failureResultOf(syncing, CancelledError)
        world.clock.advance(10)
        self.assertEqual(leaks(world.clock, world.network), [])
        for call in (
            lambda: mirror.sync(world.entries()),
            mirror.verify,
            lambda: mirror.complete([]),
        ):
            error = self.failureResultOf(call(), UsageError).value
            self.assertIn("this mirror is closed", str(error))
        world.sync()
        self.assert_complete()

    def test_progress_that_fails(self) -> None:
        """What it raises ends the run, and comes out as it is."""
        world = self.make()
        world.hosts[0].bytes_per_s = 100 * KB

        def broken(report: Report) -> None:
            raise ZeroDivisionError

        mirror = world.mirror(progress=broken)
        syncing = mirror.sync(world.entries())
        world.clock.pump([0.1] * 10)
        self.failureResultOf(syncing, ZeroDivisionError)
        self.successResultOf(mirror.close())
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_cancelled(self) -> None:
        """Connections end at once; what has come is kept for the next run."""
        world = self.make()
        world.hosts[0].bytes_per_s = 100 * KB
        mirror = world.mirror()
        syncing = mirror.sync(world.entries())
        for _ in range(20):
            world.clock.advance(0.1)
        syncing.cancel()
        self.failureResultOf(syncing, CancelledError)
        self.successResultOf(mirror.close())
        world.clock.advance(10)
        had = len(world.found())
        self.assertGreater(had, 0)
        world.hosts[0].bytes_per_s = None
        report = world.sync()
        self.assertEqual(report.present_files, had)
        self.assert_complete()

    def test_what_a_killed_run_left(self) -> None:
        """Whole files are taken up, others removed."""
        world = self.make()
        world.sync()
        incoming = world.directory / ".pipegrid-mirror" / "incoming"
        paths = sorted(path for path in world.files if world.files[path])[:3]
        for number, (path, data) in enumerate(
            zip(paths, (world.files[paths[0]], world.files[paths[1]][:-1], b"?"), strict=True)
        ):
            (world.directory / path).unlink()
            name = sha256(world.files[path]).hexdigest() if number < 2 else "nonsense"
            (incoming / f"{name}.7").write_bytes(data)
        report = world.sync()
        self.assertEqual(report.fetched_files, 2)
        self.assert_complete()
