"""What is decided of hosts and connections, with a clock of its own and no network."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror import connection_scheduler
from pipegrid.mirror.archive_file import ArchiveFile
from pipegrid.mirror.connection_scheduler import (
    ALONE_WINDOW_BYTES,
    FIRST_REQUESTS,
    FIRST_WINDOW_BYTES,
    MAX_RESTS,
    QUOTA,
    FetchSchedule,
    HostSchedule,
    ScheduledConnection,
)
from pipegrid.mirror.file_scheduler import FetchJob, Scheduler, Tally
from pipegrid.mirror.mirror_urls import parse_url

CONNECTIONS = 4


class FakeConnection(ScheduledConnection):
    """A connection without a socket: it keeps what was requested."""

    outstanding_bytes = 0

    def __init__(self, host: HostSchedule, now_s: float = 0.0) -> None:
        super().__init__(host, now_s)
        self.jobs: deque[FetchJob] = deque()

    @property
    def is_outstanding(self) -> bool:
        return bool(self.jobs)

    @property
    def unanswered(self) -> list[FetchJob]:
        return list(self.jobs)

    def request(self, job: FetchJob, now_s: float) -> bytes:
        """Request a file, as a driver does."""
        request = self.host.ask(self, job, now_s)
        self.jobs.append(job)
        self.outstanding_bytes += job.size_bytes
        self.count += 1
        return request

    def answer(self, now_s: float) -> FetchJob:
        """One response has come."""
        job = self.jobs.popleft()
        self.outstanding_bytes -= job.size_bytes
        self.answered += 1
        self.host.has_answered = True
        self.host.received_bytes += job.size_bytes
        self.last_s = now_s
        return job


def schedule_of(mirrors: int, sizes: list[int], **options: Any) -> FetchSchedule:
    """Return the schedule of files of some sizes at some mirrors."""
    addresses = [parse_url(f"http://m{number}.example/a") for number in range(mirrors)]
    plan = Scheduler(mirrors, [each.url for each in addresses])
    for number, size in enumerate(sizes):
        plan.add(ArchiveFile(f"f{number}", size, "sha256", bytes(32)))
    tallies = [Tally(each.url) for each in addresses]
    return FetchSchedule(plan, addresses, tallies, CONNECTIONS, **options)


def opened(host: HostSchedule, now_s: float = 0.0) -> FakeConnection:
    """Open a connection."""
    connection = FakeConnection(host, now_s)
    host.opened(connection)
    return connection


def filled(schedule: FetchSchedule, now_s: float = 0.0) -> list[tuple[FakeConnection, FetchJob]]:
    """Open connections and request files as far as windows allow; returns what was requested."""
    for host in schedule.hosts:
        host.widen()
        while host.may_open:
            opened(host, now_s)
    asked = []
    for connection, job in schedule.asks():
        assert isinstance(connection, FakeConnection)
        connection.request(job, now_s)
        asked.append((connection, job))
    return asked


class WindowTests(SynchronousTestCase):
    """How much is requested where."""

    def test_connections(self) -> None:
        """As many as were asked for, while anything waits; spent ones do not count, up to twice as many."""
        schedule = schedule_of(1, [1])
        (host,) = schedule.hosts
        filled(schedule)
        self.assertEqual(len(host.connections), CONNECTIONS)
        self.assertFalse(host.may_open)  # nothing waits
        schedule.plan.add(ArchiveFile("g", 1, "sha256", bytes(32)))
        for each in host.connections:
            each.count = QUOTA
        for _ in range(CONNECTIONS):
            self.assertTrue(host.may_open)
            opened(host).count = QUOTA
        self.assertFalse(host.may_open)

    def test_least_loaded(self) -> None:
        """Files are spread over connections by their bytes."""
        schedule = schedule_of(1, [100, 50, 50, 10, 1, 1])
        loads: Counter[int] = Counter()
        for connection, job in filled(schedule):
            loads[id(connection)] += job.size_bytes
        self.assertEqual(sorted(loads.values()), [12, 50, 50, 100])

    def test_unknown_host(self) -> None:
        """Few files are requested before the first response, and the rest after it."""
        schedule = schedule_of(1, [1] * 3000)
        asked = filled(schedule)
        self.assertEqual(len(asked), CONNECTIONS * FIRST_REQUESTS)
        connection, _ = asked[0]
        schedule.mirrors[0].stored(connection.answer(0.1), 1)
        self.assertEqual(len(filled(schedule)), 3000 - CONNECTIONS * FIRST_REQUESTS)

    def test_windows(self) -> None:
        """One mirror has a large window; of several each has a small one, which doubles as it is used."""
        self.assertEqual(schedule_of(1, []).hosts[0].window_bytes, ALONE_WINDOW_BYTES)
        host = schedule_of(2, []).hosts[0]
        self.assertEqual(host.window_bytes, FIRST_WINDOW_BYTES)
        for received, expected in (
            (FIRST_WINDOW_BYTES - 1, 1),
            (FIRST_WINDOW_BYTES, 2),
            (3 * FIRST_WINDOW_BYTES - 1, 2),
            (3 * FIRST_WINDOW_BYTES, 4),
        ):
            host.received_bytes = received
            host.widen()
            self.assertEqual(host.window_bytes, expected * FIRST_WINDOW_BYTES)

    def test_serial(self) -> None:
        """One request at a time, on connections that never had two; those that had are useless."""
        schedule = schedule_of(1, [1] * 40)
        (host,) = schedule.hosts
        first = filled(schedule)
        schedule.plan.becomes_serial(0)
        self.assertEqual(filled(schedule), [])
        connection = first[0][0]
        while connection.jobs:
            self.assertFalse(host.is_useless(connection))
            schedule.mirrors[0].stored(connection.answer(1), 1)
        self.assertTrue(host.is_useless(connection))
        host.lost(connection, [], "it had two requests at a time", forgiven=True)
        schedule = schedule_of(1, [1] * 9)
        schedule.plan.becomes_serial(0)
        self.assertEqual(len(filled(schedule)), CONNECTIONS)
        self.assertFalse(any(each.pipelined for each in schedule.connections))


class StallTests(SynchronousTestCase):
    """Silence."""

    def test_others(self) -> None:
        """A second is too long if there is another mirror, and the mirror rests; it is serial from now on."""
        schedule = schedule_of(2, [1] * 90)
        filled(schedule)
        self.assertEqual(schedule.tick(0.9), [])
        stalled = schedule.tick(1.1)
        self.assertEqual(len(stalled), 2 * CONNECTIONS)
        self.assertFalse(any(excused for _, _, excused in stalled))
        self.assertTrue(schedule.plan.is_serial(0) and schedule.plan.is_serial(1))

    def test_alone(self) -> None:
        """Several requests at a time are excused after three seconds, one is not, after a longer time."""
        schedule = schedule_of(1, [1] * 90)
        filled(schedule)
        self.assertEqual(schedule.tick(2.9), [])
        self.assertEqual([each[2] for each in schedule.tick(3.1)], [True] * CONNECTIONS)
        schedule = schedule_of(1, [1] * 4, lone_stall_s=5.0)
        filled(schedule)
        self.assertEqual(schedule.tick(4.9), [])
        self.assertEqual([each[2] for each in schedule.tick(5.1)], [False] * CONNECTIONS)
        self.assertFalse(schedule.plan.is_serial(0))

    def test_not_their_silence(self) -> None:
        """Nobody stalls while we read nothing, nor is that counted afterwards; idle ones never stall."""
        schedule = schedule_of(2, [1] * 90)
        opened(schedule.hosts[0])
        filled(schedule)
        schedule.is_paused = True
        self.assertEqual(schedule.tick(60), [])
        schedule.is_paused = False
        schedule.was_away(60)
        self.assertEqual(schedule.tick(60.9), [])
        for connection in list(schedule.connections):
            assert isinstance(connection, FakeConnection)
            connection.jobs.clear()
        self.assertEqual(schedule.tick(90), [])

    def test_a_mirror_that_is_left(self) -> None:
        """It does not count as another one."""
        schedule = schedule_of(2, [1] * 4)
        schedule.mirrors[0].is_out = True
        self.assertTrue(
            all(host is schedule.hosts[1] for host in (c.host for c, _ in filled(schedule)))
        )
        self.assertEqual(schedule.tick(2), [])


class RestTests(SynchronousTestCase):
    """A host that fails."""

    def test_longer_each_time(self) -> None:
        """Half a second, one, two...; what it says itself is the least; then it is given up."""
        schedule = schedule_of(2, [1])
        host = schedule.hosts[0]
        pauses = []
        for _ in range(MAX_RESTS):
            pauses.append(host.rest())
            self.assertFalse(host.can_work)
            host.rested()
            self.assertTrue(host.can_work)
        self.assertEqual(pauses, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0])
        self.assertIsNone(host.rest())
        host.give_up("it is gone")
        self.assertFalse(host.can_work)
        self.assertEqual(schedule.mirrors[0].tally.given_up, "it is gone")
        self.assertIsNone(host.next())
        self.assertIsNotNone(schedule.hosts[1].next())

    def test_good_again(self) -> None:
        """A host that gives what it should begins from the start; a server's wish is the least."""
        host = schedule_of(1, [1]).hosts[0]
        host.rest()
        host.rested()
        host.works()
        self.assertEqual(host.rest(least_s=7.0), 7.0)

    def test_the_first_is_to_blame(self) -> None:
        """Of what a lost connection owed only the first counts as broken, unless the end is forgiven."""
        schedule = schedule_of(1, [1] * 9)
        (host,) = schedule.hosts
        for forgiven, broken in ((False, 1), (True, 1)):
            connection = opened(host)
            for _ in range(3):
                job = host.next()
                assert job is not None
                connection.request(job, 0)
            host.lost(connection, connection.unanswered, "reset", forgiven)
            self.assertEqual(schedule.mirrors[0].tally.broken, broken)
            self.assertNotIn(connection, host.connections)


class StealTests(SynchronousTestCase):
    """The tail."""

    def test_duplicates(self) -> None:
        """An idle mirror takes over the last files of the slowest, spread over its connections."""
        schedule = schedule_of(2, [1 << 20] * 8)
        slow, idle = schedule.hosts
        connection = opened(slow)
        for _ in range(8):
            job = slow.next()
            assert job is not None
            connection.request(job, 0)
        ready = [opened(idle), opened(idle)]
        for tick in range(8):
            schedule.tick(tick / 8)
        moves = schedule.steals(self.fail)
        self.assertEqual([job for _, job in moves], list(connection.jobs)[:3:-1])
        self.assertEqual(Counter(id(thief) for thief, _ in moves), {id(c): 2 for c in ready})
        # Each is duplicated once for each mirror.
        self.assertEqual(len(schedule.steals(self.fail)), 4)

    def test_no_connection(self) -> None:
        """Then one is opened first; nothing is stolen while anything waits, or nothing is read."""
        schedule = schedule_of(2, [1 << 20] * 2)
        slow, idle = schedule.hosts
        connection = opened(slow)
        connection.request(slow.next() or self.fail(), 0)
        made: list[HostSchedule] = []
        self.assertEqual((schedule.steals(made.append), made), ([], []))
        connection.request(slow.next() or self.fail(), 0)
        self.assertEqual((schedule.steals(made.append), made), ([], [idle]))
        schedule.is_paused = True
        self.assertEqual((schedule.steals(made.append), made), ([], [idle]))


class FakeDriver:
    """
    Mirrors that answer late, wrongly or not at all, and a driver that does what the schedule says.

    Args:
        habits: what each mirror does: for each request it draws one word.
    """

    def __init__(self, rng: random.Random, habits: list[list[str]], sizes: list[int]) -> None:
        self.rng = rng
        self.habits = habits
        self.schedule = schedule_of(len(habits), sizes)
        self.now_s = 0.0
        self.resting: list[tuple[float, HostSchedule]] = []

    def run(self, check: Callable[[], None]) -> None:
        """Until every file is there or has failed."""
        schedule = self.schedule
        while not schedule.plan.is_idle:
            self.now_s += 0.1
            assert self.now_s < 600, schedule.plan
            for host in [host for at_s, host in self.resting if at_s <= self.now_s]:
                host.rested()
            self.resting = [each for each in self.resting if each[0] > self.now_s]
            for connection in list(schedule.connections):
                if connection.host.is_useless(connection):
                    self.end(connection, "useless", forgiven=True)
            filled(schedule, self.now_s)
            check()
            for connection in list(schedule.connections):
                self.serve(connection)
            for connection, reason, excused in schedule.tick(self.now_s):
                self.end(connection, reason, excused)
                if not excused:
                    self.rest(connection.host, reason)
            for thief, job in schedule.steals(lambda host: opened(host, self.now_s)):
                thief.request(job, self.now_s)
            check()

    def serve(self, connection: Any) -> None:
        host: HostSchedule = connection.host
        for _ in range(self.rng.randint(1, 4)):
            if not connection.jobs or connection not in host.connections:
                return
            fate = self.rng.choice(self.habits[host.mirror.number])
            if fate == "silent":
                return
            if fate == "reset":
                answered = connection.answered
                self.end(connection, "reset", forgiven=False)
                if not answered:
                    self.rest(host, "reset")
                return
            job = connection.answer(self.now_s)
            if job.is_over:
                host.put_back(job)
            elif fate == "good" or (fate == "mixed" and not connection.pipelined):
                host.works()
                host.mirror.stored(job, job.size_bytes)
            elif not host.mirror.failed(job, "refused" if fate == "missing" else "wrong", fate):
                self.end(connection, fate, forgiven=True)

    def end(self, connection: Any, reason: str, forgiven: bool) -> None:
        jobs = connection.unanswered
        connection.jobs.clear()
        connection.host.lost(connection, jobs, reason, forgiven)

    def rest(self, host: HostSchedule, reason: str) -> None:
        if not host.can_work:
            return
        pause_s = host.rest()
        if pause_s is not None:
            self.resting.append((self.now_s + pause_s, host))
            return
        for connection in list(host.connections):
            self.end(connection, reason, forgiven=True)
        host.give_up(reason)


WORDS = ("good", "good", "good", "mixed", "silent", "reset", "missing", "wrong")


class PropertyTests(SynchronousTestCase):
    """Whatever mirrors do."""

    def check(self, driver: FakeDriver) -> None:
        schedule = driver.schedule
        schedule.plan._check_invariants()
        in_flight: Counter[int] = Counter()
        for host in schedule.hosts:
            assert len(host.connections) <= 2 * CONNECTIONS, host
            assert host.can_work or not any(
                c.count == 0 and c.is_outstanding for c in host.connections
            )
            for connection in host.connections:
                jobs = connection.unanswered
                in_flight.update(map(id, jobs))
                assert len(jobs) <= 1 or connection.pipelined
                assert all(job.in_flight >> host.mirror.number & 1 for job in jobs)
        assert all(count <= len(schedule.mirrors) for count in in_flight.values())

    @settings(max_examples=80, deadline=None)
    @given(
        st.randoms(use_true_random=False),
        st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6), min_size=1, max_size=4),
        st.lists(st.integers(0, 3 << 20), max_size=30),
    )
    def test_every_file_ends(
        self, rng: random.Random, habits: list[list[str]], sizes: list[int]
    ) -> None:
        """Each file is stored once or has failed, in bounded time; one good mirror is enough for all."""
        driver = FakeDriver(rng, habits, sizes)
        driver.run(lambda: self.check(driver))
        plan = driver.schedule.plan
        self.assertEqual(plan.done_files + len(plan.failed), len(sizes))
        self.assertEqual(sum(m.tally.files for m in driver.schedule.mirrors), plan.done_files)
        if any(set(each) == {"good"} for each in habits):
            self.assertEqual(plan.failed, [])

    @settings(max_examples=40, deadline=None)
    @given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(0, 40))
    def test_mixed_up(self, rng: random.Random, mirrors: int, files: int) -> None:
        """Mirrors that are right only when asked for one file at a time give all files."""
        driver = FakeDriver(rng, [["mixed"]] * mirrors, [1000] * files)
        driver.run(lambda: self.check(driver))
        self.assertEqual(
            (driver.schedule.plan.done_files, driver.schedule.plan.failed), (files, [])
        )

    def test_redirected_hosts(self) -> None:
        """A redirected file waits for its host, which is asked on connections of its own, for the mirror."""
        self.patch(connection_scheduler, "MAX_QUEUED", 4)
        schedule = schedule_of(1, [1] * 20)
        added: list[HostSchedule] = []
        schedule.added = added.append
        asked = filled(schedule)
        connection, job = asked[0]
        schedule.mirrors[0].redirected(
            connection.answer(0.1), [b"http://n.example/b/" + job.wanted.path.encode()]
        )
        (host,) = added
        self.assertEqual(host.waiting, [job])
        self.assertTrue(schedule.waits)
        ((other, again),) = filled(schedule)
        self.assertEqual((other.host, again, len(host.connections)), (host, job, CONNECTIONS))
        self.assertTrue(schedule.mirrors[0].stored(other.answer(0.2), 1))
        self.assertEqual(schedule.plan.done_files, 1)
