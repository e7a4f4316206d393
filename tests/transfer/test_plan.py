"""Which share goes where: pure decisions, whatever the facts."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.placement import servers_of_happiness
from pipegrid.transfer.put.share_assignment import UploadPlan

properties = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def begin(plan: UploadPlan[str]) -> None:
    for number, server in plan.first().items():
        plan.sending(number, server)


class PlanTests(SynchronousTestCase):
    """One fact at a time."""

    def make(
        self, servers: str = "ABCDE", total_shares: int = 5, happy: int = 4
    ) -> UploadPlan[str]:
        plan = UploadPlan(list(servers), total_shares, happy)
        begin(plan)
        return plan

    def test_the_first_placement(self) -> None:
        """Share i to the i-th server, and round."""
        plan = UploadPlan(["A", "B", "C"], 5, 3)
        self.assertEqual(plan.first(), {0: "A", 1: "B", 2: "C", 3: "A", 4: "B"})

    def test_nothing_to_do(self) -> None:
        """As long as all goes as planned nothing moves."""
        plan = self.make()
        self.assertEqual(plan.assignments(), {})
        for number, server in enumerate("ABCDE"):
            plan.found(server, [number])
            self.assertEqual((plan.assignments(), plan.superfluous()), ({}, []))
        self.assertEqual(plan.happiness(), 5)
        self.assertEqual(plan.underway, {})

    def test_a_refusal(self) -> None:
        """The share goes to a server with less; what the refusing one has still counts."""
        plan = self.make("ABCDEF")
        plan.refused(2, "C")
        self.assertEqual(plan.assignments(), {2: "F"})
        plan.found("C", [2])
        self.assertEqual(plan.assignments(), {})
        self.assertEqual(plan.happiness(), 1)

    def test_a_failure(self) -> None:
        """All that was on its way to the server finds another one."""
        plan = UploadPlan(["A", "B", "C"], 6, 2)
        begin(plan)
        plan.failed("B")
        moves = plan.assignments()
        self.assertEqual(set(moves), {1, 4})
        self.assertNotIn("B", moves.values())

    def test_what_a_server_stored_before_it_failed_counts(self) -> None:
        """It was acknowledged, so it is durable."""
        plan = self.make()
        plan.found("B", [1])
        plan.failed("B")
        self.assertEqual(plan.happiness(), 1)
        self.assertEqual(plan.assignments(), {})

    def test_a_lost_share(self) -> None:
        """It is sent once more to the same server, then elsewhere."""
        plan = self.make()
        plan.lost(2, "C")
        self.assertEqual(plan.assignments(), {2: "C"})
        plan.sending(2, "C")
        plan.lost(2, "C")
        (home,) = plan.assignments().values()
        self.assertNotEqual(home, "C")

    def test_a_dropped_share(self) -> None:
        """It is not wanted any more, unless happiness comes to need it."""
        plan = self.make()
        plan.dropped(2, "C")
        self.assertEqual(plan.assignments(), {})
        self.assertEqual(plan.hoped_happiness(), 4)
        plan.failed("A")
        self.assertIn(2, plan.assignments())

    def test_superfluous_shares(self) -> None:
        """Shares that others have already, as many as happiness can spare."""
        plan = self.make(happy=3)
        plan.found("E", [0, 1, 2, 3, 4])
        server_for_share = plan.superfluous()
        self.assertEqual(server_for_share, [0, 1])
        self.assertGreaterEqual(plan.hoped_happiness(server_for_share), 3)

    def test_a_share_on_its_way_stays_alone_while_all_are_happy(self) -> None:
        """Two go to one server, and another has none: nothing more is sent, since it is not needed."""
        plan: UploadPlan[str] = UploadPlan("ABCDE", 5, 3)
        for number, server in enumerate("AABCD"):
            plan.sending(number, server)
        self.assertEqual(plan.assignments(), {})

    def test_no_server_is_left(self) -> None:
        """Then there is nowhere to go."""
        plan = self.make()
        for server in "ABCDE":
            plan.failed(server)
        self.assertEqual(plan.assignments(), {})
        self.assertEqual(plan.hoped_happiness(), 0)


class PlanProperties(SynchronousTestCase):
    """Random facts."""

    @properties
    @given(st.integers(1, 8), st.integers(1, 10), st.integers(1, 10), st.integers(0, 10**9))
    def test_it_ends_happily_or_not_at_all(
        self, servers: int, total_shares: int, happy: int, seed: int
    ) -> None:
        """
        Whatever servers do, moves go to servers that may take them, tries are bounded, and the end
        comes; every hope is the happiness of what is there and on its way.
        """
        chance = random.Random(seed)
        plan = UploadPlan(list(range(servers)), total_shares, happy)
        unwritable: set[int] = set()
        tries: dict[tuple[int, int], int] = {}
        truth: dict[int, set[int]] = {}

        def send(moves: dict[int, int]) -> None:
            for number, server in moves.items():
                self.assertNotIn(server, unwritable)
                self.assertNotIn(server, plan.underway.get(number, ()))
                self.assertNotIn(server, truth.get(number, set()))
                plan.sending(number, server)
                tries[number, server] = tries.get((number, server), 0) + 1
                self.assertLessEqual(tries[number, server], 2)

        send(plan.first())
        while plan.underway:
            number = chance.choice(sorted(plan.underway))
            server = min(plan.underway[number])
            fate = chance.choice(
                ["stored", "stored", "refused", "lost", "failed", "dropped", "found"]
            )
            if fate == "stored":
                plan.found(server, [number])
                truth.setdefault(number, set()).add(server)
            elif fate == "refused":
                plan.refused(number, server)
                unwritable.add(server)
            elif fate == "lost":
                plan.lost(number, server)
            elif fate == "failed":
                plan.failed(server)
                unwritable.add(server)
            elif fate == "dropped":
                if plan.hoped_happiness([number]) < happy:
                    continue
                plan.dropped(number, server)
            else:
                other = chance.randrange(servers)
                there = chance.sample(range(total_shares), chance.randint(1, total_shares))
                plan.found(other, there)
                for found in there:
                    truth.setdefault(found, set()).add(other)
            for server_for_share in plan.superfluous():
                self.assertIn(server_for_share, truth)
                for home in list(plan.underway[server_for_share]):
                    plan.dropped(server_for_share, home)
            send(plan.assignments())
            self.assertEqual(plan.happiness(), servers_of_happiness(truth))
            hoped = {n: set(homes) for n, homes in truth.items()}
            for n, homes in plan.underway.items():
                hoped.setdefault(n, set()).update(homes)
            self.assertEqual(plan.hoped_happiness(), servers_of_happiness(hoped))
        self.assertEqual(plan.assignments(), {})

    @properties
    @given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**9))
    def test_working_servers_are_enough(self, servers: int, total_shares: int, seed: int) -> None:
        """
        If some servers fail and the others take all, the result is as happy as it can be.

        It does not matter what those who work turn out to have already when they are asked.
        """
        chance = random.Random(seed)
        broken = set(chance.sample(range(servers), chance.randint(0, servers - 1)))
        there = {
            server: chance.sample(range(total_shares), chance.choice([0, 0, 1, total_shares // 2]))
            for server in range(servers)
        }
        possible = min(servers - len(broken), total_shares)
        plan = UploadPlan(list(range(servers)), total_shares, possible)
        begin_with = plan.first()
        for number, server in begin_with.items():
            plan.sending(number, server)
        while plan.underway:
            number = chance.choice(sorted(plan.underway))
            server = chance.choice(sorted(plan.underway[number]))
            if server in broken:
                plan.failed(server)
            elif there[server] and chance.random() < 0.5:
                plan.found(server, there[server])
                there[server] = []
            else:
                plan.found(server, [number])
            for moved, home in plan.assignments().items():
                plan.sending(moved, home)
            self.assertGreaterEqual(plan.hoped_happiness(), possible)
        self.assertEqual(plan.happiness(), possible)
        self.assertEqual(set(plan.stored), set(range(total_shares)))
