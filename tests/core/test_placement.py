"""Shares are placed as happily as can be, and no more of them are sent than that takes."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.placement import (
    happiness_matching,
    place_shares,
    servers_of_happiness,
)
from tests import vectors

EXAMPLES = settings(max_examples=250, deadline=None, derandomize=True)

Existing = dict[str, set[int]]
T = TypeVar("T")


def shares_to_send(placement: dict[int, T], existing: dict[T, set[int]]) -> dict[int, T]:
    """Return the part of a placement whose servers do not hold the share yet."""
    return {n: server for n, server in placement.items() if n not in existing.get(server, ())}


def brute_force_happiness(sharemap: dict[int, set[str]]) -> int:
    """Return the happiness by trying every choice of a server, or none, for every share."""
    choices = itertools.product(*([None, *sorted(servers)] for servers in sharemap.values()))
    best = 0
    for choice in choices:
        used = [server for server in choice if server is not None]
        if len(used) == len(set(used)):
            best = max(best, len(used))
    return best


def by_share(existing: Existing, placement: dict[int, str]) -> dict[int, set[str]]:
    """Return share -> servers, of what is in place and what is placed."""
    sharemap: dict[int, set[str]] = {}
    for server, shares in existing.items():
        for share in shares:
            sharemap.setdefault(share, set()).add(server)
    for share, server in placement.items():
        sharemap.setdefault(share, set()).add(server)
    return sharemap


class HappinessTests(SynchronousTestCase):
    """Servers of happiness."""

    def test_recorded_values(self) -> None:
        """The recorded maps are as happy as recorded."""
        cases = vectors.load("placement")["servers_of_happiness"]
        for case in cases:
            sharemap = {int(share): set(servers) for share, servers in case["sharemap"].items()}
            self.assertEqual(servers_of_happiness(sharemap), case["happiness"])
        self.assertEqual(len(cases), 21)

    def test_nothing(self) -> None:
        """No shares, or shares that nobody holds, make nobody happy."""
        self.assertEqual(servers_of_happiness({}), 0)
        self.assertEqual(servers_of_happiness({5: set(), 7: frozenset()}), 0)

    def test_long_chains(self) -> None:
        """A matching that must be turned over from end to end is found, however long it is."""
        size = 3000
        # Server i holds shares i and i + 1, but for the last, which holds only share 0.
        sharemap = {share: {share - 1, share} for share in range(1, size)}
        sharemap[0] = {0, size}
        self.assertEqual(servers_of_happiness(sharemap), size)

    def test_full_grid(self) -> None:
        """A thousand servers that hold all of 256 shares are no burden."""
        servers = frozenset(range(1000))
        self.assertEqual(servers_of_happiness(dict.fromkeys(range(256), servers)), 256)
        few = dict.fromkeys(range(256), frozenset(range(40)))
        self.assertEqual(servers_of_happiness(few), 40)

    @EXAMPLES
    @given(
        st.dictionaries(
            st.integers(0, 300), st.sets(st.sampled_from("abcde"), max_size=4), max_size=5
        )
    )
    def test_is_a_maximum_matching(self, sharemap: dict[int, set[str]]) -> None:
        """The matching uses only what is there, uses it once, and none is larger."""
        matching = happiness_matching(sharemap)
        for share, server in matching.items():
            self.assertIn(server, sharemap[share])
        self.assertEqual(len(set(matching.values())), len(matching))
        self.assertEqual(len(matching), brute_force_happiness(sharemap))


class PlaceSharesTests(SynchronousTestCase):
    """Placement by hand."""

    def test_empty_grid_follows_the_ring(self) -> None:
        """With nothing in place, share i goes to the i-th server."""
        servers = [f"s{i}" for i in range(12)]
        placement = place_shares(servers, ["r"], {}, 10)
        self.assertEqual(placement, {i: f"s{i}" for i in range(10)})
        self.assertEqual(list(placement), list(range(10)))

    def test_few_servers_wrap_round(self) -> None:
        """With fewer servers than shares, the ring is walked again and again."""
        placement = place_shares(["a", "b", "c"], [], {}, 8)
        self.assertEqual("".join(placement.values()), "abcabcab")

    def test_shares_in_place_stay(self) -> None:
        """Repeating an upload sends nothing, whatever the shares' places are."""
        servers = [f"s{i}" for i in range(10)]
        existing: Existing = {f"s{i}": {(i * 3 + 1) % 10} for i in range(10)}
        placement = place_shares(servers, [], existing, 10)
        self.assertEqual(shares_to_send(placement, existing), {})

    def test_only_the_difference_moves(self) -> None:
        """One server that failed costs one share, sent to the first server without any."""
        servers = [f"s{i}" for i in range(12) if i != 4]
        existing: Existing = {f"s{i}": {i} for i in range(10) if i != 4}
        placement = place_shares(servers, [], existing, 10)
        self.assertEqual(shares_to_send(placement, existing), {4: "s10"})

    def test_as_near_to_the_ring_as_it_can_be(self) -> None:
        """Servers that hold nothing get the share that readers expect there, if it is homeless."""
        placement = place_shares("abcde", [], {"b": {4}}, 5)
        self.assertEqual(placement, {0: "a", 1: "e", 2: "c", 3: "d", 4: "b"})

    def test_readonly_servers_keep_what_they_have(self) -> None:
        """A share on a read-only server counts, and frees a writable server for another one."""
        placement = place_shares("ab", "r", {"r": {0}}, 3)
        self.assertEqual(placement[0], "r")
        self.assertEqual(set(placement.values()), set("abr"))

    def test_readonly_servers_get_nothing_new(self) -> None:
        """Shares go to writable servers only, and are left out if there are none."""
        self.assertEqual(place_shares([], "rs", {"r": {1}}, 3), {1: "r"})
        self.assertEqual(place_shares([], [], {}, 3), {})

    def test_matching_is_turned_over_where_it_helps(self) -> None:
        """A read-only server's only share is left to it by one that has another."""
        existing: Existing = {"a": {0, 1}, "b": {0}}
        placement = place_shares([], "ab", existing, 2)
        self.assertEqual(placement, {0: "b", 1: "a"})

    def test_crowded_shares_spread_out(self) -> None:
        """Shares that crowd on one server are copied to servers that stand empty."""
        existing: Existing = {"a": {0, 1, 2, 3}}
        placement = place_shares("abc", [], existing, 4)
        self.assertEqual(set(placement.values()), set("abc"))
        self.assertEqual(len(shares_to_send(placement, existing)), 2)

    def test_surplus_goes_to_the_least_loaded(self) -> None:
        """When all servers have a share, the rest evens out what they have."""
        placement = place_shares("abc", [], {"a": {0, 1, 2}}, 9)
        self.assertEqual(Counter(placement.values()), Counter(a=3, b=3, c=3))

    def test_ignores_what_does_not_matter(self) -> None:
        """Share numbers beyond n, servers not listed, and servers listed twice do no harm."""
        existing: Existing = {"a": {99}, "gone": {0}, "b": {1, 200}}
        placement = place_shares(["a", "b", "a"], ["b", "r", "r"], existing, 2)
        self.assertEqual(placement, {0: "a", 1: "b"})

    def test_recorded_situations(self) -> None:
        """No recorded placement that could be carried out uses more servers than ours."""
        compared = 0
        for case in vectors.load("placement")["share_placement"]:
            existing = {server: set(shares) for server, shares in case["existing"].items()}
            ours = place_shares(case["readwrite"], case["readonly"], existing, case["num_shares"])
            self.assertEqual(list(ours), list(range(case["num_shares"])))
            theirs = case["a_tahoe_mapping"]
            if all(
                server in case["readwrite"] or int(share) in existing.get(server, ())
                for share, server in theirs.items()
            ):
                self.assertGreaterEqual(len(set(ours.values())), case["happiness"])
                compared += 1
        self.assertGreater(compared, 15)

    def test_large_grid(self) -> None:
        """A thousand servers with shares everywhere still give every share its own server."""
        servers = list(range(1000))
        existing = {server: set(range(256)) for server in servers}
        placement = place_shares(servers[500:], servers[:500], existing, 256)
        self.assertEqual(len(set(placement.values())), 256)
        self.assertEqual(shares_to_send(placement, existing), {})

    @EXAMPLES
    @given(
        st.integers(0, 3),
        st.integers(0, 2),
        st.integers(1, 4),
        st.lists(st.sets(st.integers(0, 4), max_size=4), min_size=5, max_size=5),
    )
    def test_no_assignment_is_better(
        self, num_writable: int, num_readonly: int, total_shares: int, holdings: list[set[int]]
    ) -> None:
        """Compared with every assignment: none is happier, and none as happy sends less."""
        writable = ["w0", "w1", "w2"][:num_writable]
        readonly = ["r0", "r1"][:num_readonly]
        existing: Existing = {
            server: {share for share in shares if share < total_shares}
            for server, shares in zip([*writable, *readonly], holdings, strict=False)
        }
        ours = place_shares(writable, readonly, existing, total_shares)
        self.assertEqual(
            ours, place_shares(tuple(writable), tuple(readonly), existing, total_shares)
        )

        placeable = {
            share: [*writable, *(s for s in readonly if share in existing[s])]
            for share in range(total_shares)
        }
        placeable = {share: servers for share, servers in placeable.items() if servers}
        self.assertEqual(set(ours), set(placeable))
        best = (-1, -1, 0)
        for choice in itertools.product(*placeable.values()):
            best = max(best, self.rank(dict(zip(placeable, choice, strict=True)), existing))
        self.assertEqual(self.rank(ours, existing), best)
        for share, server in ours.items():
            self.assertIn(server, placeable[share])

    def rank(self, placement: dict[int, str], existing: Existing) -> tuple[int, int, int]:
        """Return happiness of the placement alone, happiness with what is in place, shares not sent."""
        alone = len(set(placement.values()))
        together = servers_of_happiness(by_share(existing, placement))
        return together, alone, -len(shares_to_send(placement, existing))
