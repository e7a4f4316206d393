"""
Random faults on a whole grid: real servers and clients in virtual time, a schedule of faults for each seed.

A failure names its seed; ``python misc/soak/faults.py --one SEED`` replays it with its plan and timeline, and
runs ten thousand of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.hashes import Buffer
from pipegrid.disk.group_commit import GroupCommit
from pipegrid.storage.uploads.incoming_share import IncomingShare
from pipegrid.testing.fault_plan import Crash, Cut, FaultPlan
from pipegrid.transfer.put.allocation import Allocations
from pipegrid.transfer.put.share_upload import ShareState, ShareUpload
from pipegrid.transport.gbs.client import GbsServer
from tests.simulation import fault_schedules
from tests.simulation.fault_schedules import (
    Broken,
    DiskFull,
    Interruption,
    Lies,
    NoRoom,
    Outcome,
    Performance,
    Rot,
    Schedule,
    WrongKey,
    history,
    perform,
)

SCHEDULES = 200
FIRST_SEED = 20_000


def plain(**changes: object) -> Schedule:
    """Return a schedule in which nothing goes wrong but what is given."""
    options: dict[str, object] = {
        "seed": 1,
        "servers": 10,
        "required": 3,
        "total": 10,
        "happy": 7,
        "segment_bytes": 3000,
        "size": 20_000,
        "latency_s": 0.05,
        "bytes_per_s": None,
        "window_bytes": None,
        "memory_bytes": 24 << 20,
        "policy": "batch",
        "tls": False,
        "start": 0,
        "length": 20_000,
        "settled": True,
        "same_client": False,
        "interruption": None,
        "trouble": (),
        "put": FaultPlan(()),
        "damage": (),
        "get": FaultPlan(()),
        "small": True,
    }
    return Schedule(**{**options, **changes})  # type: ignore[arg-type]


class RandomTests(SynchronousTestCase):
    """As they come."""

    def test_promises_hold(self) -> None:
        """Whatever goes wrong: right bytes or the right error, nothing hangs, leaks or lies."""
        outcomes: Counter[str] = Counter()
        for seed in range(FIRST_SEED, FIRST_SEED + SCHEDULES):
            outcome = self.perform(seed)
            outcomes[outcome.put.split()[0]] += 1
            outcomes[outcome.get] += 1
        # They are worth something: every outcome is frequent.
        for name in ("stored", "unhappy", "got", "lost"):
            self.assertGreater(outcomes[name], SCHEDULES // 20, str(outcomes))

    def perform(self, seed: int) -> Outcome:
        try:
            return perform(Schedule.random(seed))
        except Exception:
            print(f"\npython misc/soak/faults.py --one {seed}")
            raise

    def test_a_seed_is_one_history(self) -> None:
        """The same seed gives the same packets at the same nanoseconds, so a failure can be replayed."""
        for seed in range(FIRST_SEED, FIRST_SEED + 15):
            self.assertEqual(self.history(seed), self.history(seed), f"seed {seed}")

    def history(self, seed: int) -> str:
        histories: list[str] = []
        perform(Schedule.random(seed), lambda done: histories.append(history(done, 100_000)))
        return histories[0]

    def test_a_schedule_prints_as_python(self) -> None:
        """What is printed makes the same schedule again."""
        names = vars(fault_schedules)
        for seed in range(FIRST_SEED, FIRST_SEED + 20):
            schedule = Schedule.random(seed)
            again = eval(str(schedule), names)
            self.assertEqual(again, schedule)


class KnownTests(SynchronousTestCase):
    """Single faults with one right end."""

    def check(self, schedule: Schedule, put: str, get: str) -> None:
        outcome = perform(schedule)
        self.assertEqual((outcome.put, outcome.get), (put, get))

    def test_nothing_goes_wrong(self) -> None:
        """Without faults a file comes back, with TLS and without."""
        for tls in (False, True):
            self.check(plain(tls=tls), "stored", "got")

    def test_wrong_keys(self) -> None:
        """Servers with another key are given nothing, and the others do."""
        trouble = tuple(WrongKey(f"s{n}") for n in range(3))
        for tls in (False, True):
            self.check(plain(tls=tls, trouble=trouble), "stored", "got")
            self.check(plain(tls=tls, trouble=trouble, happy=8), "unhappy", "got")

    def test_full_disks(self) -> None:
        """Servers whose disks are full before, in the middle of, or at the end of a share."""
        trouble = tuple(DiskFull(f"s{n}", after, None) for n, after in enumerate((0, 3000, 6900)))
        self.check(plain(trouble=trouble), "stored", "got")
        self.check(plain(trouble=trouble, happy=8), "unhappy", "got")

    def test_a_server_that_claims_everything(self) -> None:
        """It counts as one server, whatever it claims; the others get their shares."""
        lies = Lies("s4", ("claims",), tuple(range(10)))
        self.check(plain(trouble=(lies,)), "stored", "got")

    def test_servers_that_say_they_have_more(self) -> None:
        """What they do not have is sent to them after all, be it all of them who say so."""
        trouble = tuple(Lies(f"s{n}", ("overstates",), ()) for n in range(10))
        self.check(plain(trouble=trouble), "stored", "got")

    def test_servers_that_throw_away(self) -> None:
        """They are believed; while k others are honest nothing is lost."""
        trouble = tuple(Lies(f"s{n}", ("discards",), ()) for n in range(7))
        self.check(plain(trouble=trouble), "stored", "got")
        trouble = tuple(Lies(f"s{n}", ("discards",), ()) for n in range(8))
        self.check(plain(trouble=trouble), "stored", "lost")

    def test_two_shares_meet_on_one_server_while_others_are_free(self) -> None:
        """
        A share goes to a server that turns out to have another one, whose own place is lost later.

        Then one of the two goes to a further server as well, though it is on its way.
        """
        schedule = plain(
            seed=50013469,
            servers=13,
            happy=10,
            segment_bytes=1 << 20,
            window_bytes=1000,
            policy="strict",
            settled=False,
            same_client=True,
            interruption=Interruption("cancel", 1.018),
            trouble=(NoRoom("s5"), NoRoom("s12")),
            put=FaultPlan((Crash(0.353, "s5", 0.057, True),)),
        )
        self.check(schedule, "stored", "got")

    def test_rot(self) -> None:
        """A flipped bit anywhere is found; k good shares do."""
        for where in (0.0, 0.3, 0.6, 0.9, 1.0):
            damage = tuple(Rot(f"s{n}", "flip", where) for n in range(7))
            self.check(plain(damage=damage), "stored", "got")

    def test_interrupted_puts(self) -> None:
        """A put is cancelled, or its process dies, at any moment: the next one resumes it."""
        for how in ("cancel", "kill"):
            for after_s in (0.01, 0.06, 0.11, 0.16, 0.201, 0.26, 0.3, 0.35):
                interruption = Interruption(how, after_s)
                schedule = plain(
                    interruption=interruption, bytes_per_s=30_000, window_bytes=3000, happy=10
                )
                self.check(schedule, "stored again", "got")

    def test_a_process_that_dies_while_it_waits_to_try_again(self) -> None:
        """Its timers went with it, and what Python collects of it complains of nothing."""
        schedule = plain(
            interruption=Interruption("kill", 0.36),
            put=FaultPlan((Crash(0.12, "s0", 30.0),)),
            bytes_per_s=30_000,
            window_bytes=3000,
        )
        self.check(schedule, "stored again", "got")

    def test_every_server_crashes(self) -> None:
        """All servers stop in the middle of a put and come back: it goes on and ends stored."""
        crashes = tuple(Crash(0.3 + n / 100, f"s{n}", 2.0) for n in range(10))
        schedule = plain(put=FaultPlan(crashes), bytes_per_s=30_000, window_bytes=3000, happy=10)
        self.check(schedule, "stored", "got")

    def test_a_late_share_with_little_memory(self) -> None:
        """A share that joins in the middle is not held back because of hashes that nobody needs."""
        schedule = plain(
            seed=300922,
            servers=7,
            total=5,
            happy=3,
            size=48_276,
            length=37_579,
            bytes_per_s=1_000_000,
            window_bytes=20_000,
            memory_bytes=5000,
            policy="none",
            same_client=True,
            trouble=(
                NoRoom("s2"),
                Lies("s3", ("shortens",), (4,)),
                DiskFull("s6", 1589, 0.3),
            ),
            put=FaultPlan((Cut("client", "s1", 1, "s1", 19, True),)),
        )
        self.check(schedule, "stored", "got")

    def test_every_answer_is_lost(self) -> None:
        """Every first connection breaks before its last answer: it is found out, and ends stored."""
        cuts = tuple(Cut("client", f"s{n}", 0, "client", 300) for n in range(10))
        self.check(plain(put=FaultPlan(cuts), happy=10), "stored", "got")


class TeethTests(SynchronousTestCase):
    """The promises can be broken: programs that are wrong are found out."""

    def check_found_out(self, schedules: int, text: str) -> None:
        """Some schedule complains, in these words."""
        found = (self.complaint(FIRST_SEED + number) for number in range(schedules))
        self.assertIn(text, next(filter(None, found), "nothing was found"))

    def complaint(self, seed: int) -> str:
        try:
            perform(Schedule.random(seed))
        except Broken as error:
            return str(error)
        return ""

    def test_a_server_that_says_stored_too_early(self) -> None:
        """A server that acknowledges a share before it is there."""

        def commit(durability: GroupCommit, share: IncomingShare) -> Deferred[None]:
            real(durability, share).addErrback(lambda _: None)
            return succeed(None)

        real = GroupCommit.commit
        self.patch(GroupCommit, "commit", commit)
        self.check_found_out(50, "does not have share")

    def test_a_server_that_forgets_the_end(self) -> None:
        """A server that writes one byte less than it says."""
        real = IncomingShare._fill

        def fill(  # type: ignore[no-untyped-def]
            upload: IncomingShare, fd: int, begin: int, views: list[memoryview], wanted: object
        ):
            spoilt = [bytes(view) for view in views]
            spoilt[-1] = spoilt[-1][:-1] + b"?"
            real(upload, fd, begin, [memoryview(view) for view in spoilt], wanted)  # type: ignore[arg-type]

        lay_out = IncomingShare._lay_out

        def spoil(
            upload: IncomingShare, lease: bytes, data: Sequence[Buffer], *wanted: Any
        ) -> None:
            spoilt = [bytes(piece) for piece in data]
            spoilt[-1] = spoilt[-1][:-1] + b"?"
            lay_out(upload, lease, spoilt, *wanted)

        self.patch(IncomingShare, "_fill", fill)
        self.patch(IncomingShare, "_lay_out", spoil)
        self.check_found_out(50, "is wrong")

    def test_a_client_that_believes_in_what_was_lost(self) -> None:
        """A client that takes a server's "no such upload" for success."""

        def resolve_doubt(way: ShareUpload) -> None:
            if way.state == "uncertain" and not way._pending:
                way.close(ShareState.STORED)

        self.patch(ShareUpload, "resolve_uncertain", resolve_doubt)
        self.check_found_out(200, "does not have share")

    def test_a_failure_that_nobody_takes(self) -> None:
        """A client whose Deferreds fail behind its back, which shows only when they are collected."""

        def cancel(allocations: Allocations) -> None:
            real(allocations)
            fail(ValueError("nobody looks at this"))

        real = Allocations.cancel
        self.patch(Allocations, "cancel", cancel)
        self.check_found_out(1, "nobody looks at this")
        self.flushLoggedErrors(ValueError)

    def test_a_coroutine_that_cannot_be_closed(self) -> None:
        """A client that fails while it tidies up behind a put that nobody waits for any more."""

        def cancel(allocations: Allocations) -> None:
            if allocations.waiting:
                raise ValueError("this cannot be cancelled")
            real(allocations)

        real = Allocations.cancel
        self.patch(Allocations, "cancel", cancel)
        schedule = plain(interruption=Interruption("kill", 0.15))
        with self.assertRaises(Broken) as caught:
            perform(schedule)
        self.assertIn("this cannot be cancelled", str(caught.exception))

    def test_a_client_that_leaves_its_timers(self) -> None:
        """A client that does not let go of its connections."""
        self.patch(GbsServer, "disconnect", lambda server: succeed(None))
        real = Performance.check_end

        def check_end(performance: Performance) -> None:
            # Idle connections close by themselves in the end; look before that.
            self.patch(performance.world.clock, "advance", lambda amount: None)
            real(performance)

        self.patch(Performance, "check_end", check_end)
        self.check_found_out(5, "left behind")
