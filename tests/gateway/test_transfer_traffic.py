"""What a gateway keeps of the traffic of its transfers: all bytes, in a bounded number of bursts."""

from __future__ import annotations

import random

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.gateway.transfer_records import (
    JOINED_S,
    MAX_BURSTS,
    MAX_SERVERS,
    OTHERS,
    ServerTraffic,
    TrafficBurst,
    TransferTraffic,
)
from pipegrid.wire.storage_messages import ServerIdentity


def server(number: int) -> ServerIdentity:
    """Return a server."""
    return ServerIdentity(f"v0-{number}", f"server {number}", b"", b"")


class TransferTrafficTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.traffic = TransferTraffic()

    def only(self) -> ServerTraffic:
        """Return the traffic of the only server."""
        [found] = self.traffic.servers
        return found

    def test_bursts(self) -> None:
        """They keep their times, each server on its own."""
        self.traffic.note(server(1), 0.0, 0.1, 10)
        self.traffic.note(server(2), 0.0, 0.15, 20)
        self.traffic.note(server(1), 0.2, 0.3, 30)
        one, two = self.traffic.servers
        self.assertEqual((one.server_id, one.nickname, one.size_bytes), ("v0-1", "server 1", 40))
        self.assertEqual(one.bursts, [TrafficBurst(0.0, 0.1, 10), TrafficBurst(0.2, 0.3, 30)])
        self.assertEqual(two.bursts, [TrafficBurst(0.0, 0.15, 20)])

    def test_pipelined(self) -> None:
        """Messages that were sent at the same time are acknowledged one after the other."""
        for number in (1, 2, 3):
            self.traffic.note(server(1), 0.0, number / 10, 5)
        bursts = self.only().bursts
        self.assertEqual([burst.began_s for burst in bursts], [0.0, 0.1, 0.2])
        self.assertEqual([burst.ended_s for burst in bursts], [0.1, 0.2, 0.3])

    def test_pieces_are_joined(self) -> None:
        """Those that arrive within half a millisecond are one burst, not all of a stream."""
        for number in range(16):
            at_s = number * JOINED_S / 4.5
            self.traffic.note(server(1), at_s, at_s, 1)
        self.assertEqual([burst.size_bytes for burst in self.only().bursts], [5, 5, 5, 1])

    def test_bursts_are_bounded(self) -> None:
        """In a transfer that takes long, and in one with bursts of all lengths; no byte is lost."""
        for seed, most_s in ((1, 0.01), (2, 10.0), (3, 1000.0)):
            rng = random.Random(seed)
            self.traffic = TransferTraffic()
            now_s, size_bytes, kept = 0.0, 0, []
            for number in range(20_000):
                took_s = rng.random() * most_s
                now_s += rng.random() * most_s
                self.traffic.note(server(number % 7), now_s - took_s, now_s, 1 + number % 3)
                size_bytes += 1 + number % 3
                kept.append(sum(len(each.bursts) for each in self.traffic.servers))
            self.assertLessEqual(max(kept), MAX_BURSTS)
            self.assertGreater(kept[-1], MAX_BURSTS // 8)
            self.assertEqual(sum(each.size_bytes for each in self.traffic.servers), size_bytes)
            for each in self.traffic.servers:
                times = [at_s for burst in each.bursts for at_s in burst[:2]]
                self.assertEqual(times, sorted(times))
                self.assertEqual(each.bursts[-1].ended_s, max(times))

    def test_servers_are_bounded(self) -> None:
        """What passes to more of them is counted as that of others."""
        self.assertLess(MAX_SERVERS + 1, MAX_BURSTS // 2, "joining would not end")
        for number in range(10_000):
            self.traffic.note(server(number), number, number + 0.5, 3)
        found = self.traffic.servers
        self.assertEqual(len(found), MAX_SERVERS + 1)
        self.assertEqual((found[-1].server_id, found[-1].nickname), ("", OTHERS))
        self.assertEqual(found[-1].size_bytes, 3 * (10_000 - MAX_SERVERS))
        self.assertLessEqual(sum(len(each.bursts) for each in found), MAX_BURSTS)

    def test_a_clock_that_stands(self) -> None:
        """An end before a begin, or before the last end, makes no burst with a negative length."""
        for began_s, ended_s in ((5.0, 4.0), (1.0, 2.0), (5.0, 5.0)):
            self.traffic.note(server(1), began_s, ended_s, 1)
        self.assertEqual(self.only().bursts, [TrafficBurst(5.0, 5.0, 3)])
