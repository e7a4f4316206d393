"""Redirects: what is followed, what is learnt, and that nothing wrong comes of any of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any
from urllib.parse import unquote

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror import connection_scheduler
from pipegrid.mirror.archive_file import wanted
from pipegrid.mirror.connection_scheduler import FIRST_REQUESTS
from pipegrid.mirror.epoll_response_head import UnsupportedResponse
from pipegrid.mirror.epoll_socket_cache import SocketCache
from pipegrid.mirror.fetch_run import MirrorRun
from pipegrid.mirror.local_check import VerifyPolicy
from pipegrid.mirror.mirror_urls import HostAccess, RedirectRefused, own_route, parse_url
from pipegrid.mirror.mirror_without_reactor import fetch_small
from pipegrid.mirror.redirects import (
    MAX_LOCATION_BYTES,
    MAX_REDIRECTS,
    RedirectTable,
    located,
)
from pipegrid.testing.network import run
from tests.mirror.test_mirror_api import MirrorCase
from tests.mirror.test_sprint import Server, SprintCase, ok
from tests.mirror.world import ok as world_ok


def moved(location: bytes | str, body: bytes = b"", status: bytes = b"302 Found") -> bytes:
    """A redirect."""
    location = location if isinstance(location, bytes) else location.encode()
    return b"HTTP/1.1 %s\r\nServer: x\r\nLocation: %s\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        location,
        len(body),
        body,
    )


def _moved_to(location: str, _: str) -> bytes:
    return moved(location)


def _moved_with(status: bytes, body: bytes, _: Server, there: Server, path: str, __: int) -> bytes:
    return moved(there.url + path, body, status)


class LocationTests(SynchronousTestCase):
    """One field of a stranger."""

    def test_followed(self) -> None:
        """Absolute, relative, another port, another host, in any case, with blanks and letters."""
        for url, location, expected in (
            ("http://a/d/x", b"http://b/e/x", "http://b/e/x"),
            ("http://a/d/x", b"HTTP://B:80/e/x#y", "http://b/e/x"),
            ("http://a/d/x", b"https://b:8443", "https://b:8443/"),
            ("http://a/d/x", b"http://b?q=1", "http://b/?q=1"),
            ("http://a/d/x", b"http://[2001:db8::1]:81/x", "http://[2001:db8::1]:81/x"),
            ("http://a/d/x", b"/e/x", "http://a/e/x"),
            ("http://a/d/x", b"y", "http://a/d/y"),
            ("http://a/d/x", b"../y", "http://a/y"),
            ("http://a:81/d/x", b"?q=1", "http://a:81/d/x?q=1"),
            ("https://a/d/x", b"//b/x", "https://b/x"),
            ("http://a/x", b"/a b\xc3\xa9", "http://a/a%20b%C3%A9"),
            ("http://a/x", b"/a%2Bb", "http://a/a%2Bb"),
            ("http://a/x", b" /y ", "http://a/y"),
        ):
            self.assertEqual(located(url, [location]), expected, location)
        self.assertEqual(located("http://a/x", [b"/y", b"/y"]), "http://a/y")

    def test_refused(self) -> None:
        """Each with a clause that says why, and that shows no password."""
        for url, locations, why in (
            ("http://a/x", [], "without saying where"),
            ("http://a/x", [b"  "], "without saying where"),
            ("http://a/x", [b"/a", b"/b"], "several URLs"),
            ("http://a/x", [b"/" + b"a" * MAX_LOCATION_BYTES], "URL of 4097 bytes"),
            ("http://a/x", [b"/a\x00b"], "characters"),
            ("http://a/x", [b"http:\\\\b/"], "characters"),
            ("http://a/x", [b"ftp://joe:secret@b/x?token"], "'ftp://b/x', which is neither"),
            ("http://a/x", [b"file:///etc/passwd"], "neither http nor https"),
            ("http://a/x", [b"javascript:alert(1)"], "neither http nor https"),
            ("http://a/x", [b"http://joe:secret@b/x"], "user name"),
            ("http://a/x", [b"//joe:secret@b/x"], "user name"),
            ("http://a/x", [b"http:///x"], "not a URL"),
            ("http://a/x", [b"http://b%41/x"], "not a URL"),
            ("http://a/x", [b"http://[::1/x"], "not a URL"),
            ("http://a/x", [b"//[::1/x"], "not a URL"),
            ("http://a/x", [b"http://b:0/x"], "port"),
            ("http://a/x", [b"http://b:65536/x"], "port"),
            ("https://a/x", [b"http://a/x"], "from https to http"),
        ):
            with self.assertRaises(RedirectRefused) as caught:
                located(url, locations)
            self.assertIn(why, str(caught.exception), locations)
            self.assertNotIn("secret", str(caught.exception))
            self.assertNotIn("token", str(caught.exception))


class TableTests(SynchronousTestCase):
    """What is learnt."""

    def setUp(self) -> None:
        self.table = RedirectTable(HostAccess({}))
        self.mirror = HostAccess({}).address("http://a/debian/")

    def follow(self, path: str, location: str) -> None:
        self.table.follow(own_route(self.mirror, path), [location.encode()])

    def where(self, path: str) -> str | None:
        """Where a path is expected."""
        route = self.table.route_of(own_route(self.mirror, path).url)
        return None if route is None else route.url

    def test_general(self) -> None:
        """The same path on another host stands for all of it; an end that is the same for all before it."""
        self.follow("pool/a", "http://b/debian/pool/a")
        self.assertEqual(self.where("dists/x"), "http://b/debian/dists/x")
        self.setUp()
        self.follow("pool/a", "http://b/x/pool/a")
        self.assertEqual(self.where("dists/x"), "http://b/x/dists/x")
        self.setUp()
        self.follow("pool/p/a", "http://b/p/a")
        self.assertEqual(self.where("pool/q/c"), "http://b/q/c")
        self.assertIsNone(self.where("dists/x"))

    def test_nothing_to_learn(self) -> None:
        """A query, or another name."""
        for location in ("http://b/pool/a?sig=1", "http://b/blobs/1234", "/debian/pool/b"):
            self.follow("pool/a", location)
        self.assertIsNone(self.where("pool/a"))

    def test_served_itself(self) -> None:
        """What a host serves itself is not expected elsewhere; its other directories are."""
        self.table.served(own_route(self.mirror, "dists/sid/InRelease").url)
        self.follow("pool/p/a", "http://b/debian/pool/p/a")
        self.assertIsNone(self.where("dists/sid/main"))
        self.assertEqual(self.where("pool/q/c"), "http://b/debian/pool/q/c")
        self.table.served(own_route(self.mirror, "pool/q/d").url)
        self.assertIsNone(self.where("pool/p/a"))

    def test_wrong(self) -> None:
        """A rule that was wrong is never made again, nor one that says more; a narrower one may be."""
        self.follow("pool/p/a", "http://b/debian/pool/p/a")
        self.table.forget("http://a/")
        self.assertIsNone(self.where("pool/p/a"))
        self.follow("pool/p/a", "http://b/debian/pool/p/a")
        self.assertEqual(self.where("pool/q/c"), "http://b/debian/pool/q/c")
        self.assertEqual(own_route(self.mirror, "x").url, "http://a/debian/x")
        self.assertIsNone(self.table.route_of("http://a/ubuntu/pool/p/a"))

    def test_circles(self) -> None:
        """Nothing is expected anywhere by rules that lead in a circle, or to themselves."""
        self.follow("pool/a", "http://b/debian/pool/a")
        there = self.table.route_of("http://a/debian/pool/a")
        assert there is not None
        self.table.follow(there, [b"http://a/debian/pool/a"])
        self.assertIsNone(self.where("pool/a"))
        self.setUp()
        self.follow("pool/a", "http://a/debian/x/debian/pool/a")
        self.assertIn(self.where("pool/b"), (None, "http://a/debian/x/debian/pool/b"))

    def test_bounds(self) -> None:
        """Neither rules nor hosts grow without end."""
        for number in range(2000):
            with contextlib.suppress(RedirectRefused):
                self.follow(f"p{number}/a", f"http://h{number}/x{number}/a")
        self.assertLessEqual(len(self.table._rules), 1024)
        self.assertLessEqual(len(self.table._addresses), 512)
        for number in range(5000):
            self.table.served(f"http://a/debian/q{number}/b")
        self.assertLessEqual(len(self.table._unlearnt), 4096 + 1)


class SprintRedirectTests(SprintCase):
    """Without a reactor, over real sockets."""

    spare_processors = 1

    def pair(self, answer: Callable[[Server, Server, str, int], bytes | None]) -> tuple[Any, Any]:
        """Start two servers, of which the first answers so."""
        first, second = self.server(), self.server()
        first.answer = lambda path, count: answer(first, second, path, count)
        return first, second

    def assert_all(self, *servers: Server, done: bool = True) -> Any:
        work, is_done = self.run_on_epoll(*servers)
        self.assertEqual((is_done, work.report.failed), (done, []))
        self.assertEqual(self.found(), self.files)
        return work

    def test_one_host(self) -> None:
        """All statuses; and what is asked after the first is asked of the other host alone."""
        for status in (b"301 M", b"302 F", b"303 S", b"307 T", b"308 P"):
            first, _ = self.pair(partial(_moved_with, status, b"body"))
            work = self.assert_all(first)
            tally = work.report.tallies[0]
            self.assertEqual(tally.files, len(self.files))
            self.assertEqual(tally.received_bytes, sum(map(len, self.files.values())))
            self.assertEqual(work.report.retries, 0)
            again, _ = self.run_on_epoll(first)
            self.assertEqual(again.report.present_files, len(self.files))
            self.tearDown()
            self.setUp()

    def test_learnt(self) -> None:
        """What comes later goes to the other host at once, and each file once."""
        self.patch(connection_scheduler, "MAX_QUEUED", 8)
        self.files = {f"p{n}/f{n}": b"%d" % n * 40_000 for n in range(3000)}
        first, second = self.pair(lambda a, b, p, n: moved(b.url + p))
        self.assert_all(first)
        self.assertLess(len(first.asked), 2900)
        self.assertEqual(len(second.asked), len(self.files))

    def test_few_before_the_first_response(self) -> None:
        """A host that was never asked may redirect all files, so not all are asked of it at once."""
        self.files = {f"p{n}/f{n}": b"%d" % n for n in range(3000)}

        def answer(first: Server, second: Server, path: str, count: int) -> bytes:
            if count == 1:
                time.sleep(0.5)
            return moved(second.url + path)

        first, second = self.pair(answer)
        self.assert_all(first)
        self.assertLessEqual(len(first.asked), 4 * FIRST_REQUESTS)
        self.assertEqual(len(second.asked), len(self.files))

    def test_one_for_each_file(self) -> None:
        """Places that say nothing of other places."""
        first, second = self.pair(lambda a, b, p, n: moved(f"{b.url}blob?{p}"))
        second.answer = lambda path, _: ok(self.files[path.partition("?")[2]])
        self.assert_all(first)
        self.assertEqual(len(first.asked), len(self.files))

    def test_in_the_middle_of_others(self) -> None:
        """Some redirected, some not, on one connection."""
        first, second = self.pair(
            lambda a, b, p, n: moved(b.url + p) if n % 3 else ok(self.files[p])
        )
        work = self.assert_all(first)
        self.assertGreater(len(second.asked), 0)
        self.assertEqual(work.report.retries, 0)

    def test_same_host(self) -> None:
        """Another path of the same server, relative."""
        server = self.server()
        server.answer = lambda path, _: (
            ok(self.files[path.removeprefix("x/")]) if path[:2] == "x/" else moved("/x/" + path)
        )
        self.assert_all(server)

    def test_chain(self) -> None:
        """Five times, not six."""
        self.files = dict(list(self.files.items())[:9])
        for times, failed in ((MAX_REDIRECTS + 1, 9), (MAX_REDIRECTS, 0)):
            server = self.server()

            def answer(path: str, _: int, times: int = times) -> bytes:
                name, mark, hops = path.partition("?")
                number = int(hops) if mark else 0
                return ok(self.files[name]) if number == times else moved(f"?{number + 1}")

            server.answer = answer
            work, _ = self.run_on_epoll(server)
            self.assertEqual(len(work.report.failed), failed)
        self.assertEqual(self.found(), self.files)

    def test_endless(self) -> None:
        """Loops, and what is not followed, are refusals of the mirror; another one has the files."""
        self.files = dict(list(self.files.items())[:9])
        for location, why in (
            ("http://127.0.0.1:1/x", None),
            ("?", "more than 5 times"),
            ("", "without saying where"),
            ("ftp://b/x", "neither http nor https"),
            ("http://joe:secret@b/x", "user name"),
        ):
            server = self.server()
            server.answer = lambda *_, location=location: moved(location)
            work, done = self.run_on_epoll(server)
            self.assertEqual(self.found(), {})
            if why is None:
                self.assertFalse(done)
                continue
            self.assertEqual(len(work.report.failed), 9)
            for _, reason in work.report.failed:
                self.assertIn(why, reason)
                self.assertNotIn("secret", reason)
        bad = self.server()
        bad.answer = lambda *_: moved("")
        self.assert_all(bad, self.server())

    def test_long_bodies(self) -> None:
        """What is said with a redirect is read if it is short, and costs the connection if it is not."""
        for size in (1000, 64 << 10, (64 << 10) + 1, 300_000):
            self.files = dict(list(self.files.items())[:9])
            first, _ = self.pair(partial(_moved_with, b"302 Found", b"x" * size))
            self.assert_all(first)
            self.tearDown()
            self.setUp()

    def test_learnt_wrongly(self) -> None:
        """The other host lacks what it was not said to have, or has it wrong: the first one is asked."""
        kept = [path for number, path in enumerate(self.files) if number % 5]
        for absent in (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", ok(b"wrong")):
            first, second = self.pair(
                lambda a, b, p, n: moved(b.url + p) if p in kept else ok(self.files[p])
            )
            second.answer = lambda path, _, absent=absent: (
                ok(self.files[path]) if path in kept else absent
            )
            work = self.assert_all(first)
            self.assertEqual(work.report.tallies[0].given_up, None)
            self.tearDown()
            self.setUp()

    def test_not_there(self) -> None:
        """The other host lacks what it was said to have: that is named with both."""
        first, second = self.pair(lambda a, b, p, n: moved(f"{b.url}x?{p}"))
        second.answer = lambda *_: b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"
        self.files = dict(list(self.files.items())[:9])
        work, _ = self.run_on_epoll(first)
        self.assertEqual(len(work.report.failed), 9)
        self.assertIn(
            f"{first.url}: redirected to {second.url[:-1]}, it answers 404",
            work.report.failed[0][1],
        )

    def test_other_content(self) -> None:
        """The hash holds whoever is asked."""
        first, second = self.pair(lambda a, b, p, n: moved(b.url + p))
        second.answer = lambda path, _: ok(bytes(len(self.files[path])))
        self.run_on_epoll(first)
        self.assertEqual(self.found(), {p: d for p, d in self.files.items() if not any(d)})

    def test_several_mirrors(self) -> None:
        """One that redirects shares the work with one that does not; a lost host costs no file."""
        first, second = self.pair(lambda a, b, p, n: moved(b.url + p))
        self.assert_all(first, self.server())
        self.tearDown()
        self.setUp()
        first, second = self.pair(lambda a, b, p, n: moved(b.url + p))
        second.answer = lambda path, count: ok(self.files[path]) if count < 5 else None
        self.assert_all(first, self.server())

    def test_mixed_up(self) -> None:
        """Redirects of pipelined requests that come in another order lead to wrong files at most."""
        paths = list(self.files)
        swapped = dict(zip(paths, [paths[1], paths[0], *paths[2:]], strict=True))
        first, second = self.pair(
            lambda a, b, p, n: moved(f"{b.url}x?{p if n == 1 else swapped[p]}")
        )
        second.answer = lambda path, _: ok(self.files[path.partition("?")[2]])
        self.run_on_epoll(first)
        for path, data in self.found().items():
            self.assertEqual(data, self.files[path])


class SmallFileTests(SprintCase):
    """Release files, without a reactor."""

    spare_processors = 1

    def fetch(self, server: Server, *paths: str) -> Any:
        address = parse_url(server.url)
        with contextlib.closing(SocketCache([address])) as ahead:
            return fetch_small(address, [(path, 100) for path in paths], ahead, lambda: False)

    def test_followed(self) -> None:
        """Each once; what belongs together comes from one host, whatever the redirects say."""
        others = [self.server({"a": b"a%d" % n, "b": b"b%d" % n}) for n in range(2)]
        first = self.server({})
        first.answer = lambda path, count: moved(others[count % 2].url + path)
        found = self.fetch(first, "a", "b")
        self.assertIn(dict(found), [{"a": b"a%d" % n, "b": b"b%d" % n} for n in range(2)])

    def test_refused(self) -> None:
        """Neither a circle nor a missing file is waited for."""
        first, second = self.server({}), self.server({"a": b"data"})
        missing = b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"
        second.answer = lambda path, _: ok(b"data") if path == "a" else missing
        first.answer = lambda path, _: moved(second.url + path)
        found = self.fetch(first, "a", "b")
        self.assertEqual((dict(found), list(found.refused)), ({"a": b"data"}, ["b"]))
        self.assertIn("answers 404 for b", found.refused["b"])
        first.answer = lambda *_: moved("?")
        found = self.fetch(first, "a")
        self.assertIn("more than 5 times", found.refused["a"])

    def test_nobody_there(self) -> None:
        """Who cannot be reached is for the ordinary way to ask, which says so."""
        first = self.server({})
        first.answer = lambda *_: moved("http://127.0.0.1:1/a")
        self.assertRaises((OSError, UnsupportedResponse), self.fetch, first, "a")


class ReactorRedirectTests(MirrorCase):
    """On a reactor, in virtual time."""

    def redirecting(self, hosts: int = 2, **options: Any) -> Any:
        """Two hosts, of which the first redirects to the second; only the first is a mirror."""
        world = self.make(hosts, **options)
        world.hosts[0].answer = lambda path: moved(f"http://m1/archive/{path}".replace(" ", "%20"))
        return world

    def sync(self, world: Any, *mirrors: int) -> Any:
        return world.sync(mirrors=mirrors or (0,))

    def test_learnt(self) -> None:
        """All of it comes, each file once from the other host, and few are asked of the first."""
        world = self.redirecting()
        report = self.sync(world)
        self.assert_complete()
        self.assertEqual((report.failed, report.retries), ([], 0))
        self.assertEqual(set(world.hosts[1].requests.values()), {1})
        self.assertEqual(report.tallies[0].files, len(world.files))

    def test_one_for_each_file(self) -> None:
        """Places that say nothing of other places."""
        world = self.redirecting()
        world.hosts[0].answer = lambda path: moved(f"http://m1/x?{path}".replace(" ", "%20"), b"b")
        files = world.files
        world.hosts[1].answer = lambda path: world_ok(files[unquote(path).partition("?")[2]])
        report = self.sync(world)
        self.assert_complete()
        self.assertEqual((report.failed, report.retries), ([], 0))

    def test_not_followed(self) -> None:
        """Named, with why; another mirror has it."""
        for location, why in (
            ("?", "more than 5 times"),
            ("", "without saying where"),
            ("ftp://m1/", "neither http nor https"),
            ("http://joe:secret@m1/", "user name"),
        ):
            world = self.make(2)
            world.hosts[0].answer = partial(_moved_to, location)
            report = self.sync(world)
            self.assertEqual(report.failed_files, len(world.files))
            self.assertIn(why, report.failed[0][1])
            self.assertNotIn("secret", report.failed[0][1])
            world = self.make(2)
            world.hosts[0].answer = partial(_moved_to, location)
            self.sync(world, 0, 1)
            self.assert_complete()

    def test_lost_host(self) -> None:
        """The other host is not there: the run ends, with what it says of it."""
        world = self.redirecting()
        world.hosts[0].answer = lambda path: moved(f"http://m7/archive/{path}".replace(" ", "%20"))
        report = self.sync(world)
        self.assertEqual(report.failed_files, len(world.files))
        self.assertIn("http://m7", report.failed[0][1])
        self.assertLess(report.elapsed_s, 120)

    def test_busy_host(self) -> None:
        """It says "not now" for a while."""
        world = self.redirecting()
        until_s = 2.0
        world.hosts[1].answer = lambda path: (
            world_ok(b"", status=b"503 Busy") if world.clock.seconds() < until_s else None
        )
        self.sync(world)
        self.assert_complete()

    def test_learnt_wrongly(self) -> None:
        """What the other host lacks without having been said to have it, the first one gives."""
        world = self.redirecting()
        kept = set(list(world.files)[::3])
        world.hosts[0].answer = lambda path: (
            moved(f"http://m1/archive/{path}".replace(" ", "%20")) if path in kept else None
        )
        world.hosts[1].files = {path: world.files[path] for path in kept}
        report = self.sync(world)
        self.assert_complete()
        self.assertEqual(report.failed, [])

    def test_learnt_before(self) -> None:
        """What the epoll driver has learnt leads to the other host at once, which is nobody's news."""
        world = self.redirecting()
        mirror = world.mirror(mirrors=(0,))
        path, *_ = world.files
        first = [each for each in world.entries() if each[0] == path]
        run(world.clock, mirror.sync(first), limit_s=60, network=world.network)
        rest = MirrorRun(mirror.destination, mirror._addresses, VerifyPolicy())
        for name, data in world.files.items():
            if name != path:
                rest.plan.add(wanted(name, len(data), {"sha256": sha256(data).digest()}))
        rest.all_read = True
        report = run(world.clock, mirror.finish(rest), limit_s=60, network=world.network)
        run(world.clock, mirror.close(), network=world.network)
        self.assertEqual(report.failed, [])
        self.assert_complete()
        self.assertEqual(sum(world.hosts[0].requests.values()), 1)

    def test_host_that_breaks(self) -> None:
        """Connections to the other host end in the middle; it goes on."""
        world = self.redirecting()
        world.hosts[1].closes_after = 7
        self.sync(world)
        self.assert_complete()
