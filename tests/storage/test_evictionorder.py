"""Who is next to be given up, found without going through all uploads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.storage.uploads import eviction
from pipegrid.storage.uploads.eviction import (
    Client,
    EvictionOrder,
    UploadDemand,
    is_being_written,
    is_stale,
)
from tests.storage.test_standing import HONEST, Fake

CLIENTS = [Client(f"10.0.0.{address}", number) for address in range(3) for number in range(3)]


def may_go(uploads: Iterable[Fake], client: Client, wanted: int, now: float) -> list[Fake]:
    """Return who might be given up next for a client that wants so many, as the rules say it."""
    addresses = Counter(each.client.address for each in uploads)
    clients = Counter(each.client for each in uploads)
    found = []
    for each in uploads:
        owner = each.client
        if is_stale(each, now):
            found.append(each)
        elif owner == client or is_being_written(each, now):
            continue
        elif owner.address != client.address:
            if addresses[owner.address] > addresses[client.address] + wanted:
                found.append(each)
        elif (
            now - each.last_write >= eviction.SIBLING_S or clients[owner] > clients[client] + wanted
        ):
            found.append(each)
    return found


class EvictionOrderTests(SynchronousTestCase):
    """``EvictionOrder``, while uploads come, are written to, change hands and go."""

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.integers(0, 1 << 32))
    def test_as_the_rules_say(self, seed: int) -> None:
        """Whatever has happened, who is chosen may go, and somebody is whenever somebody may go."""
        rng = random.Random(seed)
        uploads: list[Fake] = []
        order: EvictionOrder[Fake] = EvictionOrder(uploads, False, 0.0)
        now = 0.0
        for _ in range(150):
            now += rng.choice((0.0, 0.1, 5.0, 60.0, 500.0))
            action = rng.randrange(6)
            if action < 2 or not uploads:
                upload = Fake(rng.choice(CLIENTS), 10**6, now, now)
                uploads.append(upload)
                order.add(upload)
            elif action == 2:
                upload = rng.choice(uploads)
                upload.last_write = now
                upload.came_bytes += rng.choice((1, 1000, 300_000))
                upload.complete = upload.came_bytes >= upload.share_bytes
                upload.came_bytes = min(upload.came_bytes, upload.share_bytes)
            elif action == 3:
                upload = rng.choice(uploads)
                order.remove(upload)
                upload.client = rng.choice(CLIENTS)
                order.add(upload)
            elif action == 4:
                upload = uploads.pop(rng.randrange(len(uploads)))
                order.remove(upload)
            else:
                client, places = rng.choice(CLIENTS), rng.randrange(1, 4)
                before = list(uploads)
                wanted: list[Fake] = []
                for each in order.choose(client, UploadDemand(1, 1, places, 0), now):
                    self.assertIn(each, may_go(before, client, 1, now))
                    before.remove(each)
                    wanted.append(each)
                if not wanted:
                    enough = sum(1 for _ in self.greedy(uploads, client, places, now))
                    self.assertLess(enough, places)
            self.assertEqual(len(order), len(uploads))
        for each in uploads:
            order.remove(each)
        self.assertEqual((len(order), order._addresses, order._holders), (0, {}, {}))

    def greedy(
        self, uploads: list[Fake], client: Client, places: int, now: float
    ) -> Iterable[Fake]:
        """
        Give up whoever may go, until there is enough: those first who may go whatever else goes.

        A client that has more than its siblings has less with each that goes. So one of its uploads that is
        young may be kept by another that went before, and one that is idle is not.
        """
        left = list(uploads)

        def last(upload: Fake) -> tuple[bool, bool, bool]:
            """Say how late it goes: stale ones first, then those of other addresses, then idle ones."""
            return (
                not is_stale(upload, now),
                upload.client.address == client.address,
                now - upload.last_write < eviction.SIBLING_S,
            )

        for _ in range(places):
            found = may_go(left, client, 1, now)
            if not found:
                return
            chosen = min(found, key=last)
            left.remove(chosen)
            yield chosen

    def looked_at(self, count: int, hoarders: int = 1) -> int:
        """Return how many uploads are looked at for a choice, of so many."""
        looks = 0

        class Counting(Fake):
            """Counts how often it is looked at."""

            @property
            def remaining_bytes(self) -> int:
                """What has not come; asked for with everything else."""
                return 1

            def __getattribute__(self, name: str) -> object:
                nonlocal looks
                if name == "last_write":
                    looks += 1
                return super().__getattribute__(name)

        uploads = [
            Counting(
                Client(f"10.1.{number % hoarders}.1", number % hoarders), last_write=number / 4
            )
            for number in range(count)
        ]
        now = count / 4
        order: EvictionOrder[Fake] = EvictionOrder(uploads, False, now)
        looks = 0
        rounds = 100
        for number in range(rounds):
            (chosen,) = order.choose(HONEST, UploadDemand(1, 1, 1, 0), now)
            order.remove(chosen)
            order.add(Counting(Client("10.9.0.1", number % 7), began=now, last_write=now))
            order.choose(Client("10.1.0.1", 0), UploadDemand(1, 1, 1, 0), now)
        return looks // rounds

    def test_few_are_looked_at(self) -> None:
        """A choice among 4096 looks at hardly more of them than one among 256, whoever has them."""
        for hoarders in (1, 64):
            few, many = self.looked_at(256, hoarders), self.looked_at(4096, hoarders)
            self.assertGreater(few, 0)
            self.assertLess(many, 2 * few + 20)
            self.assertLess(many, 200)

    def test_nothing_heaps_up(self) -> None:
        """What has gone is forgotten, also by heaps in which it never came first."""
        order: EvictionOrder[Fake] = EvictionOrder([Fake() for _ in range(10)], False, 0.0)
        for number in range(5000):
            upload = Fake(Client(f"10.0.1.{number % 50}", number), last_write=float(number))
            order.add(upload)
            order.remove(upload)
        for heap in (order._stale, order._most):
            self.assertLess(len(heap._entries), 500)
