"""Looking after many objects on a whole grid: what it costs in round trips and messages; what is found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import attrs
from twisted.internet.defer import CancelledError
from twisted.python.failure import Failure

from pipegrid.core.caps import ChkCap, LitCap
from pipegrid.errors import CapError, CapMismatch, PipegridError, UsageError
from pipegrid.server.gbs import responses
from pipegrid.server.gbs.body_receivers import InSteps
from pipegrid.server.gbs.request_check import Request
from pipegrid.server.gbs.surveys import Survey
from pipegrid.testing.fault_plan import FaultPlan
from pipegrid.transfer.results import CheckResult, RepairResult
from pipegrid.transfer.settings import DownloadSettings, UpkeepSettings
from pipegrid.transport.gbs.requests import GbsSettings
from pipegrid.wire import gbs_surveys_releases
from pipegrid.wire.gbs_paths_headers import Resource
from pipegrid.wire.gbs_surveys_releases import SurveyAnswer
from tests.simulation.grid_budgets import warm_up
from tests.simulation.grid_world import LIES, Client, GridWorld, StorageHost
from tests.simulation.test_grid_budgets import RTT_S, BudgetTestCase

FILES = 200


class UpkeepTestCase(BudgetTestCase):
    """Ten servers, 100 ms away, with small files."""

    world: GridWorld
    client: Client
    caps: list[ChkCap]

    def store(self, files: int = FILES, **options: Any) -> None:
        """Store so many, and make sure that all connections are open."""
        self.world = self.make_world()
        self.client = self.world.client(**options)
        warm_up(self.world, self.client)
        random = Random(1)
        data = [random.randbytes(random.randrange(60, 2000)) for _ in range(files)]
        stored = self.world.run(self.client.grid.put_many(data))
        self.caps = []
        for one in stored:
            assert not isinstance(one, Failure)
            assert isinstance(one.cap, ChkCap)
            self.caps.append(one.cap)
        self.world.run(self.client.grid.check_many(self.caps))  # as many connections as that takes
        self.world.clock.advance(1)

    def empty(self, number: int) -> int:
        """Remove all shares of one server; returns how many."""
        root = self.world.servers[number].root / "shares"
        shares = [
            path
            for path in root.rglob("*")
            if path.is_file() and "incoming" not in path.parts and path.name.isdigit()
        ]
        for path in shares:
            path.unlink()
        return len(shares)

    def check(self, **options: Any) -> tuple[list[Any], float]:
        """Check all of them; returns outcomes, and round trips."""
        outcomes, took_s = self.world.timed(
            lambda: self.client.grid.check_many(self.caps, **options)
        )
        return outcomes, round(took_s / RTT_S, 3)

    def requests(self) -> Counter[str]:
        """Return how many requests of each kind all servers have answered."""
        count: Counter[str] = Counter()
        for server in self.world.servers:
            for (operation, _), number in server.site.service.requests.items():
                count[operation] += number
        return count


class CostTests(UpkeepTestCase):
    """What it costs."""

    def test_a_round_trip_for_all(self) -> None:
        """Hundreds of objects, with and without leases: one round trip, and one message for 64 of them."""
        self.store()
        for options in ({}, {"add_lease": True}):
            before = self.requests()
            outcomes, trips = self.check(**options)
            self.assertEqual(trips, 1.0)
            self.assertTrue(all(one.healthy for one in outcomes))
            self.assertTrue(all(len(one.renewed) == (10 if options else 0) for one in outcomes))
            asked = self.requests() - before
            self.assertEqual(asked, Counter(survey=10 * -(-FILES // 64)))
        outcomes, took_s = self.world.timed(lambda: self.client.grid.renew_many(self.caps))
        self.assertEqual(round(took_s / RTT_S, 3), 1.0)
        self.assertTrue(all(len(one.leases) == 10 for one in outcomes))

    def test_one_by_one(self) -> None:
        """What it is measured against: a round trip and twelve requests for each."""
        self.store(20)
        before = self.requests()
        seconds = [self.world.timed(lambda c=c: self.client.grid.check(c))[1] for c in self.caps]  # type: ignore[misc]
        self.assertEqual([round(s / RTT_S, 3) for s in seconds], [1.0] * 20)
        self.assertEqual((self.requests() - before).total(), 20 * 12)

    def test_a_server_was_emptied(self) -> None:
        """Found in one round trip, made good in three: ask, fetch, store."""
        self.store()
        lost = self.empty(3)
        self.assertGreaterEqual(lost, FILES)
        outcomes, trips = self.check()
        self.assertEqual(trips, 1.0)
        self.assertEqual({len(one.good_shares) for one in outcomes}, {9})
        outcomes, trips = self.check(repair=True, add_lease=True)
        self.assertLessEqual(trips, 4.0)
        self.assertTrue(all(isinstance(one, RepairResult) and one.whole for one in outcomes))
        self.assertTrue(all(len(one.renewed) == 10 for one in outcomes))
        outcomes, _ = self.check(verify=True)
        self.assertTrue(all(one.healthy and not one.corrupt for one in outcomes))

    def test_bounds(self) -> None:
        """So many jobs at once mean so many round trips more."""
        self.store(40)
        _, trips = self.check(bounds=UpkeepSettings(jobs=10))
        self.assertEqual(trips, 4.0)

    def test_servers_that_know_no_surveys(self) -> None:
        """They are asked by ordinary requests, together: a round trip more, to find that out."""
        self.store(100)
        for server in self.world.servers:
            forget(server, Resource.SURVEY)
        before = self.requests()
        outcomes, trips = self.check(add_lease=True)
        self.assertTrue(all(one.healthy and len(one.renewed) == 10 for one in outcomes))
        self.assertLessEqual(trips, 4.0)
        asked = self.requests() - before
        self.assertEqual((asked["list"], asked["lease"]), (1000, 1000))
        before = self.requests()
        self.check()
        self.assertNotIn("POST", self.requests() - before, "they are not tried again")


class FindingsTests(UpkeepTestCase):
    """What is found, and what goes wrong."""

    def test_each_object_once(self) -> None:
        """A cap that is given twice, or once as a verify cap, is one object; each gets the outcome."""
        self.store(3)
        caps: list[Any] = [
            *self.caps,
            self.caps[0],
            self.caps[1].verifier(),
            LitCap(b"x"),
            "nonsense",
        ]
        told: list[int] = []
        before = self.requests()
        outcomes = self.world.run(
            self.client.grid.check_many(caps, ended=lambda number, _: told.append(number))
        )
        self.assertEqual((self.requests() - before)["survey"], 10)
        self.assertEqual(sorted(told), list(range(7)))
        for cap, outcome in zip(caps[:6], outcomes, strict=False):
            assert isinstance(outcome, CheckResult)
            self.assertTrue(outcome.healthy)
            self.assertEqual(outcome.cap, cap)
        assert isinstance(outcomes[6], Failure)
        self.assertIsInstance(outcomes[6].value, CapError)

    def test_lost_and_damaged(self) -> None:
        """Each is told of as one by one; a wrong cap and a lost object stop nobody."""
        self.store(30)
        lost, wrong = self.caps[0], attrs.evolve(self.caps[1], size=self.caps[1].size + 1)
        for server in self.world.servers[:8]:
            for number in server.shares(lost.storage_index):
                Path(server.share_path(lost.storage_index, number)).unlink()
        self.caps[1] = wrong
        for options in ({}, {"verify": True}, {"repair": True}):
            outcomes, _ = self.check(**options)
            self.assertIsInstance(outcomes[1].value, CapMismatch)
            for one in outcomes[2:]:
                self.assertTrue(one.healthy)
            found = outcomes[0]
            self.assertIsInstance(found, CheckResult)
            self.assertFalse(found.recoverable)
            single = self.world.run(self.client.grid.check(lost))
            self.assertEqual(found.good_shares, single.good_shares)

    def test_shares_in_unusual_places(self) -> None:
        """Objects of which no share is where it should be are healthy all the same."""
        self.store(10)
        other = self.world.client("other", seed="other ")
        outcomes = self.world.run(other.grid.check_many(self.caps, add_lease=True))
        for one in outcomes:
            assert isinstance(one, CheckResult)
            self.assertTrue(one.healthy)
            self.assertEqual(len(one.renewed), 10)

    def test_lying_servers(self) -> None:
        """Whatever a server says, it costs no other object, and nothing hangs."""
        for lie in LIES:
            self.store(12)
            self.empty(0)
            liar = self.world.servers[4]
            liar.lies, liar.claimed = frozenset({lie}), frozenset(range(10))
            outcomes, _ = self.check(repair=True, add_lease=True)
            for one in outcomes:
                if isinstance(one, Failure):
                    self.assertIsInstance(one.value, PipegridError, lie)
                else:
                    state = one.after if isinstance(one, RepairResult) else one
                    self.assertTrue(state.recoverable, lie)

    def test_a_server_that_answers_nonsense(self) -> None:
        """It counts as out of reach, with the reason; too long, too short and wrong answers alike."""
        self.store(5)
        for body in (
            b"",
            b"\xff",
            b"\x80",
            b"\x85" + b"\x00" * 5,
            b"\x85" + b"\x83\x80\x00\x80" * 4,
            b"\x9f",
        ):
            answer_with(self.world.servers[2], Survey, body)
            outcomes, trips = self.check()
            self.assertEqual(trips, 1.0)
            for one in outcomes:
                self.assertEqual(one.unreachable, ["s2"])
                self.assertEqual(len(one.good_shares), 9)
                self.assertIn("s2 answered a survey with", one.reasons["s2"])

    def test_an_answer_without_end(self) -> None:
        """What is longer than any answer may be is not read to its end."""
        self.store(5)
        answer_with(self.world.servers[2], Survey, bytes(8 << 20))
        outcomes, _ = self.check()
        for one in outcomes:
            self.assertEqual((one.unreachable, len(one.good_shares)), (["s2"], 9))
            self.assertIn("8388608 bytes", one.reasons["s2"])

    def test_answers_to_other_questions(self) -> None:
        """Bytes of another object, in answers that changed places, are no proof of anything."""
        self.store(20)
        unpack = gbs_surveys_releases.unpack_survey_answers
        seen: list[bytes] = []

        def turn(body: Any, questions: Any) -> Any:
            answers = []
            for answer, question in zip(unpack(body, questions), questions, strict=True):
                assert isinstance(answer, SurveyAnswer)
                told = []
                for data, sample in zip(answer.samples, question.samples, strict=True):
                    assert isinstance(data, bytes)
                    seen.append(data)
                    told.append(seen[len(seen) // 2 - 1][: sample.length])
                answers.append(answer._replace(samples=tuple(told)))
            return answers

        self.patch(gbs_surveys_releases, "unpack_survey_answers", turn)
        outcomes, _ = self.check()
        self.assertGreater(len(seen), 20)
        for one in outcomes:
            assert isinstance(one, CheckResult)
            self.assertTrue(one.healthy)

    def test_a_server_out_of_reach(self) -> None:
        """It is named for every object, and costs its patience once, not once an object."""
        self.store(150, gbs=GbsSettings(connect_timeout_s=5.0, timeout_s=20.0))
        self.world.servers[7].host.crash()
        began_s = self.world.clock.seconds()
        outcomes = self.world.run(
            self.client.grid.check_many(self.caps, bounds=UpkeepSettings(jobs=20))
        )
        self.assertLess(self.world.clock.seconds() - began_s, 30.0)
        for one in outcomes:
            assert isinstance(one, CheckResult)
            self.assertEqual(one.unreachable, ["s7"])
            self.assertEqual(len(one.good_shares), 9)

    def test_a_server_that_falls_silent(self) -> None:
        """The same of one that takes questions and answers none."""
        self.store(100, download=DownloadSettings(silence_s=10.0))
        self.world.network.partition("s7", None, 600.0)
        began_s = self.world.clock.seconds()
        outcomes = self.world.run(
            self.client.grid.check_many(self.caps, bounds=UpkeepSettings(jobs=20))
        )
        self.assertLess(self.world.clock.seconds() - began_s, 11.0)
        self.assertTrue(all(one.unreachable == ["s7"] for one in outcomes))  # type: ignore[union-attr]

    def test_cancelling(self) -> None:
        """At any moment: nothing is left behind, and the grid works on."""
        self.store(100)
        self.empty(3)
        for moment_s in (0.0, 0.02, 0.09, 0.12, 0.18, 0.25, 0.33):
            running = self.client.grid.check_many(self.caps, repair=True, add_lease=True)
            self.world.clock.advance(moment_s)
            running.addErrback(lambda failure: failure.trap(CancelledError))
            running.cancel()
            self.world.clock.advance(1)
            self.assertTrue(running.called)
        outcomes, _ = self.check(repair=True)
        for one in outcomes:
            self.assertTrue(one.whole if isinstance(one, RepairResult) else one.healthy)

    def test_what_ended_raises(self) -> None:
        """It ends all, and comes out."""
        self.store(10)

        def ended(number: int, _: Any) -> None:
            raise ZeroDivisionError(number)

        with self.assertRaises(ZeroDivisionError):
            self.world.run(self.client.grid.check_many(self.caps, ended=ended))

    def test_wrong_calls(self) -> None:
        """A sentence says what was expected."""
        self.store(1)
        for wrong in ("URI:CHK:x", 5, None):
            with self.assertRaises(UsageError):
                self.world.run(self.client.grid.check_many(wrong))  # type: ignore[arg-type]
        with self.assertRaises(UsageError):
            self.world.run(self.client.grid.renew_many([], ended=3))  # type: ignore[arg-type]
        self.assertEqual(self.world.run(self.client.grid.check_many([])), [])


class FaultTests(UpkeepTestCase):
    """Connections that are lost, servers that crash and return, at random moments."""

    def test_random_faults(self) -> None:
        """Every object has an outcome, and afterwards all can be made whole."""
        for seed in range(12):
            self.store(20)
            self.empty(seed % 10)
            names = [server.name for server in self.world.servers]
            plan = FaultPlan.random(seed, [self.client.name], names, 1.0, 3.0, faults=6)
            plan.apply(self.world.network)
            running = self.client.grid.check_many(self.caps, repair=True, add_lease=True)
            outcomes = self.world.run(running)
            self.assertEqual(len(outcomes), 20, str(plan))
            for one in outcomes:
                if isinstance(one, Failure):
                    self.assertIsInstance(one.value, PipegridError, str(plan))
            self.world.clock.advance(60)
            after, _ = self.check(repair=True)
            for one in after:
                whole = one.whole if isinstance(one, RepairResult) else one.healthy
                self.assertTrue(whole, str(plan))


def forget(server: StorageHost, resource: Resource) -> None:
    """Make a server one of those that do not know a kind of request."""
    service = server.site.service
    begin = service.begin

    def begin_others(request: Request) -> Any:
        if request.target is not None and request.target.resource is resource:
            request.target = None
        return begin(request)

    service.begin = begin_others  # type: ignore[method-assign]


def answer_with(server: StorageHost, kind: type[InSteps], body: bytes) -> None:
    """Have a server answer every message of a kind with these bytes."""
    service = server.site.service
    begin = service.begin

    def begin_lying(request: Request) -> Any:
        receiver = begin(request)
        if isinstance(receiver, kind):
            receiver._handler = lambda _: responses.cbor(body)
        return receiver

    service.begin = begin_lying  # type: ignore[method-assign]
