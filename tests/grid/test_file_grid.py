"""The grid as an application sees it."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.internet.task import Clock
from twisted.internet.threads import deferToThread
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid import Grid
from pipegrid.core.caps import ChkCap, DirectoryCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import CapError, PipegridError, ServerUnreachable, UsageError
from pipegrid.grid.client_creation import create_local
from pipegrid.grid.server_readiness import WAIT_FOR_S
from pipegrid.transfer.peers import Peer
from pipegrid.transport.local_server import INLINE_BYTES
from tests.transfer.world import CONVERGENCE, RTT, Told, World, content


class GridTests(SynchronousTestCase):
    """What its methods make of their arguments."""

    def setUp(self) -> None:
        self.world = World()
        self.grid = self.world.grid

    def assert_refused(self, kind: type[PipegridError], call: Deferred[Any], *words: str) -> None:
        failure = self.failureResultOf(call, kind)
        for word in words:
            self.assertIn(word, str(failure.value))
        self.assertEqual([line.calls for line in self.world.lines], [[]] * 10)

    def test_convergence(self) -> None:
        """The configured secret, another one, none, or a random key."""
        data = content(1000)

        def put(**options: object) -> str:
            return str(self.world.run(self.grid.put(data, **options)).cap)  # type: ignore[arg-type]

        usual = put()
        self.assertEqual(put(), usual)
        self.assertEqual(put(convergence=CONVERGENCE), usual)
        others = {put(convergence=b""), put(convergence=b"other"), put(random_key=True)}
        others |= {put(random_key=True), put(random_key=True, convergence=CONVERGENCE)}
        self.assertEqual(len(others | {usual}), 6)

    def test_parameters(self) -> None:
        """Other than configured; happiness is capped by the number of shares only if it was not asked."""
        result = self.world.run(self.grid.put(content(1000), params=Params(2, 5)))
        self.assertEqual((result.happiness, len(result.shares_placed)), (5, 5))
        refused = self.grid.put(content(1000), params=Params(2, 5), happy=6)
        failure = self.failureResultOf(refused, UsageError)
        self.assertIn("choose happy from 1 to 5", str(failure.value))

    def test_literal_files(self) -> None:
        """They are put, got and checked without a server."""
        for data in (b"", b"short"):
            result = self.successResultOf(self.grid.put(data))
            self.assertEqual((result.size, result.share_bytes, result.happiness), (len(data), 0, 0))
            self.assertEqual(self.successResultOf(self.grid.read(str(result.cap))), data)
            check = self.successResultOf(self.grid.check(result.cap, verify=True))
            self.assertTrue(check.healthy and check.recoverable)
        self.assertEqual([line.calls for line in self.world.lines], [[]] * 10)

    def test_ranges(self) -> None:
        """Clipped at the end; empty ones ask nobody."""
        data = content(1000)
        file = self.world.plant(self.world.encoded(data))
        literal = self.successResultOf(self.grid.put(b"0123456789")).cap
        self.assertEqual(self.successResultOf(self.grid.read(literal, 2, 3)), b"234")
        self.assertEqual(self.successResultOf(self.grid.read(literal, 8, 100)), b"89")
        self.assertEqual(self.successResultOf(self.grid.read(literal, 10)), b"")
        self.assertEqual(self.successResultOf(self.grid.read(file.cap, 1000)), b"")
        self.assertEqual(self.successResultOf(self.grid.read(file.cap, 5, 0)), b"")
        self.assertEqual([line.calls for line in self.world.lines], [[]] * 10)
        self.assertEqual(self.world.run(self.grid.read(str(file.cap), 990, 100)), data[990:])

    def test_impossible_ranges(self) -> None:
        """Said before anybody is asked."""
        cap = self.world.encoded(content(1000)).cap
        self.assert_refused(UsageError, self.grid.read(cap, 1001), "byte 1001", "1000 bytes")
        self.assert_refused(UsageError, self.grid.read(cap, -1), "byte -1")
        self.assert_refused(UsageError, self.grid.read(cap, 0, -1), "-1 bytes")

    def test_caps_of_other_kinds(self) -> None:
        """What cannot be read as a file says what it is."""
        cap = self.world.encoded(content(1000)).cap
        directory = str(DirectoryCap(cap))
        self.assert_refused(CapError, self.grid.get(directory, BytesIO()), "a directory")
        self.assert_refused(CapError, self.grid.read(cap.verifier()), "cannot read the file")
        self.assert_refused(CapError, self.grid.check("nonsense"))
        self.world.plant(self.world.encoded(content(1000)))
        self.assertTrue(self.world.run(self.grid.check(directory)).healthy)

    def test_many_large_files_keep_to_the_memory_budget(self) -> None:
        """They go one behind the other as far as memory goes, and all arrive."""
        params = Params(3, 10, 4 << 20)
        world = World(params=params)
        puts = [world.grid.put(content(5_000_000, i)) for i in range(3)]
        free = world.grid._upload_memory.free
        self.assertGreaterEqual(free, 0)
        self.assertLess(free, 32 << 20)
        results = world.run(gatherResults(puts))
        self.assertEqual({result.happiness for result in results}, {10})
        self.assertEqual(world.grid._upload_memory.free, 32 << 20)

    def test_status(self) -> None:
        """Who is there, how far away, with how much room; and why not."""
        self.world.lines[1].down = True
        self.world.lines[2].silent = {"*"}
        self.world.lines[3].storage.capacity_bytes = 5000
        status, took = self.world.timed(self.grid.status())
        self.assertEqual(took, 10.0)
        self.assertEqual([s.nickname for s in status], [line.name for line in self.world.lines])
        self.assertEqual([s.reachable for s in status], [True, False, False] + [True] * 7)
        self.assertEqual((status[0].rtt_s, status[0].version), (RTT, "memory"))
        self.assertEqual(status[3].available_bytes, 5000)
        self.assertIn("is down", status[1].reason or "")
        self.assertIn("silent for 10 s", status[2].reason or "")
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_status_of_servers_to_wait_for(self) -> None:
        """It waits for those that come back in time, and tells how all are if too few do."""
        self.world.lines[0].down = self.world.lines[1].down = True
        waiting = self.world.client(wait_for=9).status()
        self.world.clock.pump([0.1] * 100)
        self.assertNoResult(waiting)
        self.world.lines[0].down = False
        status = self.world.run(waiting)
        self.assertEqual([s.reachable for s in status], [True, False] + [True] * 8)
        began = self.world.clock.seconds()
        status = self.world.run(self.world.client(wait_for=10).status())
        self.assertGreaterEqual(self.world.clock.seconds() - began, WAIT_FOR_S)
        self.assertEqual([s.reachable for s in status], [True, False] + [True] * 8)
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_closing(self) -> None:
        """All that runs ends; afterwards every method says that the grid is closed."""
        running = [self.grid.put(content(1000)), self.grid.status()]
        self.successResultOf(self.grid.close())
        for call in running:
            self.failureResultOf(call, CancelledError)
        self.assertEqual(self.world.clock.getDelayedCalls(), [])
        self.successResultOf(self.grid.close())
        for refused in (
            self.grid.put(b"x"),
            self.grid.get("URI:LIT:", BytesIO()),
            self.grid.read("URI:LIT:"),
            self.grid.check("URI:LIT:"),
            self.grid.status(),
        ):
            failure = self.failureResultOf(refused, UsageError)
            self.assertIn("closed", str(failure.value))

    def test_closing_twice(self) -> None:
        """Nobody is told before nothing is left, and who gives up waiting for it does not keep it up."""
        slow: Deferred[None] = Deferred()
        leaving = self.grid._workers.stop

        def stop() -> Deferred[None]:
            return slow.addCallback(lambda _: leaving())

        self.patch(self.grid._workers, "stop", stop)
        first, second = self.grid.close(), self.grid.close()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertNoResult(second)
        slow.callback(None)
        self.successResultOf(second)
        self.successResultOf(self.grid.close())

    def test_closing_with_servers_that_fail(self) -> None:
        """A connection that cannot be closed properly is gone all the same, and so are the others."""
        gone: list[Peer] = []

        class Broken:
            def disconnect(self) -> Deferred[None]:
                failed: Deferred[None] = Deferred()
                failed.errback(ServerUnreachable("it is gone"))
                return failed

        class Fine:
            def disconnect(self) -> Deferred[None]:
                gone.append(peers[1])
                done: Deferred[None] = Deferred()
                done.callback(None)
                return done

        peers = self.grid._peers[:2]
        peers[0].server, peers[1].server = Broken(), Fine()  # type: ignore[assignment]
        self.successResultOf(self.grid.close())
        self.assertEqual(gone, [peers[1]])

    def test_progress_of_a_get(self) -> None:
        """In plaintext bytes of the range."""
        file = self.world.plant(self.world.encoded(content(1000)))
        told = Told()
        self.world.run(self.grid.get(file.cap, BytesIO(), start=100, length=50, progress=told))
        self.assertEqual(told, [(50, 50)])


class OpenTests(TestCase):
    """Real directories, threads and the real reactor."""

    async def check_grid(self, grid: Grid) -> None:
        data = content(300_000)
        path = self.mktemp()
        Path(path).write_bytes(data)
        result = await grid.put(path)
        self.assertEqual(result.happiness, 7 if len(grid._peers) == 7 else len(grid._peers))
        self.assertEqual(await grid.read(result.cap), data)
        check = await grid.check(result.cap, verify=True)
        self.assertTrue(check.healthy)
        status = await grid.status()
        self.assertTrue(all(server.reachable for server in status))
        self.assertEqual({server.protocol for server in status}, {"local"})
        await grid.close()

    async def test_giving_up_in_a_callback(self) -> None:
        """Whoever is told of progress, or is written to, may cancel then and there; others go on."""
        directory = Path(self.mktemp())
        create_local(directory)
        grid = await Grid.open(reactor, directory)
        self.addCleanup(grid.close)
        cap = (await grid.put(content(9_000_000))).cap
        running: list[Deferred[Any]] = []

        def enough(*told: int) -> None:
            if 0 < told[-2] < told[-1]:
                running[-1].cancel()

        class Full(BytesIO):
            def write(self, data: Any, /) -> int:
                running[-1].cancel()
                return super().write(data)

        for begin in (
            lambda: grid.put(content(9_000_000, 1), progress=enough),
            lambda: grid.put_many([content(9_000_000, 2)], progress=enough),
            lambda: grid.get(cap, BytesIO(), progress=enough),
            lambda: grid.get(cap, Full()),
        ):
            running.append(begin())
            other = grid.read(cap)
            with self.assertRaises(CancelledError):
                await running[-1]
            self.assertEqual(await other, content(9_000_000))
        self.assertEqual(grid._running, set())

    async def test_closing_in_a_callback(self) -> None:
        """What calls back at this moment is cancelled as all else is, and not told of gone threads."""
        directory = Path(self.mktemp())
        create_local(directory)
        closing: list[Deferred[None]] = []
        for option in ("hashing", "cap_known", "progress"):
            grid = await Grid.open(reactor, directory)

            def close(*_told: object, grid: Grid = grid) -> None:
                closing.append(grid.close())

            options: dict[str, Any] = {option: close}
            with self.assertRaises(CancelledError):
                await grid.put(content(3_000_000), random_key=option != "hashing", **options)
            await gatherResults(closing)

    async def test_thousands_of_reads_at_once(self) -> None:
        """Of an embedded grid wait for its threads, as they would for a connection; none is refused."""
        directory = Path(self.mktemp())
        create_local(directory, servers=1, params=Params(1, 1), durability="none")
        grid = await Grid.open(reactor, directory)
        self.addCleanup(grid.close)
        cap = (await grid.put(content(100))).cap
        assert isinstance(cap, ChkCap)
        server = grid._peers[0].server
        reads = [server.read(cap.storage_index, 0, 0, INLINE_BYTES + 1) for _ in range(1200)]
        self.assertEqual(len(set(await gatherResults(reads))), 1)

    async def test_a_call_from_another_thread(self) -> None:
        """Nothing of Twisted's can be called from there; the grid says so, and what to do instead."""
        directory = Path(self.mktemp())
        create_local(directory)
        grid = await Grid.open(reactor, directory)
        self.addCleanup(grid.close)
        calls: tuple[Callable[[], Deferred[Any]], ...] = (
            lambda: grid.put(b"some bytes"),
            lambda: grid.put_many([b"some bytes"]),
            grid.close,
            lambda: Grid.open(reactor, directory),
        )
        for call in calls:
            failures: list[Failure] = []
            await deferToThread(lambda: call().addErrback(failures.append) and None)  # noqa: B023
            self.assertIn("callFromThread", str(failures[0].value))
        self.assertEqual(await grid.read((await grid.put(b"some bytes")).cap), b"some bytes")

    async def test_an_embedded_grid(self) -> None:
        """Files that are put are there, also for who opens the directory again."""
        directory = Path(self.mktemp())
        create_local(directory, servers=4, durability="none")
        await self.check_grid(await Grid.open(reactor, directory))
        again = await Grid.open(reactor, str(directory))
        found = await again.put(content(300_000))
        self.assertEqual((found.shares_placed, len(found.shares_found)), ({}, 10))
        self.assertIsNone(again.created)
        await again.close()

    async def test_a_fixed_window(self) -> None:
        """Every server has it, whatever the way to it would need; files come and go as ever."""
        directory = Path(self.mktemp())
        create_local(directory, servers=4, durability="none")
        grid = await Grid.open(reactor, directory, window_bytes=10_000)
        self.assertEqual({peer.pipeline.limit_bytes for peer in grid._peers}, {10_000})
        await self.check_grid(grid)

    async def test_the_users_own_directory(self) -> None:
        """It is made when it is first needed, and the user is told; not if that may not be."""
        directory = str(Path(self.mktemp()).absolute())
        self.patch(__import__("os"), "environ", {"PIPEGRID_DIR": directory})
        with self.assertRaisesRegex(UsageError, f"no grid is configured in {directory}, .*init"):
            await Grid.open(reactor, make=False)
        self.assertFalse(Path(directory).exists())
        grid = await Grid.open(reactor)
        self.assertIn(directory, grid.created or "")
        await grid.close()
        grid = await Grid.open(reactor)
        self.assertIsNone(grid.created)
        await grid.close()

    async def test_no_servers(self) -> None:
        """A directory that is configured without any says how to get some."""
        directory = Path(self.mktemp())
        create_local(directory)
        (directory / "pipegrid.cfg").write_text("[client]\n")
        for where, word in ((directory, "[local]"), (directory / "missing", "init")):
            with self.assertRaises(UsageError) as caught:
                await Grid.open(Clock(), where)
            self.assertIn(word, str(caught.exception))
