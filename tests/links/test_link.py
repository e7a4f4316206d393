"""The arithmetic of links: exact, fair, never early, never too fast."""

from __future__ import annotations

import heapq
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.testing.link_model import NANOSECONDS, Bottleneck, Flow, LinkPath, Packet, to_ns


def drain(line: Bottleneck, now_ns: int = 0) -> list[Packet]:
    """Send everything that waits, calling whenever the line asks to be called."""
    packets = line.transmit(now_ns)
    while (next_ns := line.next_ns()) is not None:
        packets += line.transmit(next_ns)
    return packets


class LineTests(SynchronousTestCase):
    """One bottleneck and what passes through it."""

    def test_an_infinite_line_costs_the_latency_only(self) -> None:
        """Any amount arrives one latency later, whole."""
        path = LinkPath(0.05, Bottleneck())
        path.line.offer(7, path.open(), 1 << 20)
        packets = path.line.transmit(7)
        self.assertEqual({packet.arrival_ns for packet in packets}, {7 + to_ns(0.05)})
        self.assertEqual(sum(packet.size_bytes for packet in packets), 1 << 20)

    def test_bytes_take_their_time(self) -> None:
        """The last byte arrives size ÷ rate + latency after the first could be sent."""
        path = LinkPath(0.05, Bottleneck(1_000_000))
        path.line.offer(0, path.open(), 3_000_000)
        self.assertEqual(drain(path.line)[-1].arrival_ns, to_ns(3.05))

    def test_no_drift(self) -> None:
        """A rate that divides nothing evenly is exact after a hundred thousand packets."""
        path = LinkPath(0, Bottleneck(3_000_000, packet_bytes=1000))
        path.line.offer(0, path.open(), 100_000_000)
        packets = drain(path.line)
        self.assertEqual(len(packets), 100_000)
        exact = Fraction(100_000_000 * NANOSECONDS, 3_000_000)
        self.assertLess(abs(packets[-1].arrival_ns - exact), 1)

    def test_flows_take_turns(self) -> None:
        """A small request waits for the packet on the line and one turn, not for a whole upload."""
        line = Bottleneck(1_000_000)
        busy = LinkPath(0, line).open()
        small = LinkPath(0.01, line).open()
        line.offer(0, busy, 1_000_000)
        packets = line.transmit(0)
        line.offer(1, small, 200)
        packets += drain(line, 1)
        (arrival_ns,) = [packet.arrival_ns for packet in packets if packet.flow is small]
        self.assertEqual(arrival_ns, to_ns(0.01 + (2 * line.packet_bytes + 200) / 1e6))
        self.assertEqual(max(packet.arrival_ns for packet in packets), to_ns(1.0002))

    def test_equal_flows_get_equal_shares(self) -> None:
        """Ten uploads over one line end within one round of turns of each other."""
        line = Bottleneck(1_000_000)
        flows = [LinkPath(0, line).open() for _ in range(10)]
        for flow in flows:
            line.offer(0, flow, 100_000)
        packets = drain(line)
        ends = [max(p.arrival_ns for p in packets if p.flow is flow) for flow in flows]
        self.assertEqual(max(ends), to_ns(1))
        self.assertGreaterEqual(min(ends), to_ns(1 - 10 * line.packet_bytes / 1e6))

    def test_a_line_of_its_own_for_every_flow(self) -> None:
        """Where the bottleneck is per connection, a second connection doubles the throughput."""
        path = LinkPath(0, Bottleneck(1_000_000), line_per_flow=True)
        for flow in (path.open(), path.open()):
            flow.line.offer(0, flow, 1_000_000)
            self.assertEqual(drain(flow.line)[-1].arrival_ns, to_ns(1))

    def test_a_late_call_loses_no_rate(self) -> None:
        """Timers of a real reactor are late; packets start when they should have all the same."""
        path = LinkPath(0, Bottleneck(1_000_000, packet_bytes=10_000))
        path.line.offer(0, path.open(), 50_000)
        path.line.transmit(0)
        late = path.line.transmit(to_ns(5))
        self.assertEqual([p.start_ns for p in late], [to_ns(n / 100) for n in (1, 2, 3, 4)])

    def test_stall_and_resume(self) -> None:
        """What was on its way arrives in spite of a stall; the rest follows after it."""
        line = Bottleneck(1_000_000, packet_bytes=10_000)
        path, other = LinkPath(0.5, line), LinkPath(0.5, line)
        line.offer(0, path.open(), 20_000)
        (first,) = line.transmit(0)
        path.stall()
        self.assertEqual(first.arrival_ns, to_ns(0.51))
        self.assertIsNone(line.next_ns())
        self.assertEqual(line.transmit(to_ns(1)), [])
        line.offer(to_ns(1), other.open(), 5_000)
        (passing,) = line.transmit(to_ns(1))
        self.assertEqual(passing.arrival_ns, to_ns(1.505))
        path.resume(to_ns(2))
        (second,) = line.transmit(to_ns(2))
        self.assertEqual(second.arrival_ns, to_ns(2.51))

    def test_slow_and_back(self) -> None:
        """A slowed path has a multiple of the latency and a part of the rate; nothing overtakes."""
        line = Bottleneck(1_000_000, packet_bytes=10_000)
        path = LinkPath(0.1, line)
        flow = path.open()
        path.slow_down(0, 10)
        line.offer(0, flow, 10_000)
        (slow,) = line.transmit(0)
        self.assertEqual(slow.arrival_ns, to_ns(0.1 + 1))
        path.speed_up(to_ns(0.1), 10)
        line.offer(to_ns(0.1), flow, 10_000)
        (quick,) = line.transmit(to_ns(0.1))
        self.assertEqual(quick.arrival_ns, to_ns(1.1))
        line.offer(to_ns(2), flow, 10_000)
        (usual,) = line.transmit(to_ns(2))
        self.assertEqual(usual.arrival_ns, to_ns(2.11))

    def test_impossible_links(self) -> None:
        """A rate of nothing and a negative latency are refused at once."""
        self.assertRaises(ValueError, Bottleneck, 0)
        self.assertRaises(ValueError, LinkPath, -1, Bottleneck())


offers = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(0, 2), st.integers(1, 300_000)),
    min_size=1,
    max_size=25,
)


class LinkProperties(SynchronousTestCase):
    """What holds for any traffic."""

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(
        offers, st.integers(1000, 10**9), st.integers(1, 1 << 16), st.lists(st.integers(0, 10**9))
    )
    def test_conservation(
        self,
        sends: list[tuple[int, int, int]],
        rate: int,
        packet_bytes: int,
        stall_times: list[int],
    ) -> None:
        """Every byte leaves once, in order, never early, never above the rate, stalls or not."""
        line = Bottleneck(rate, packet_bytes=max(packet_bytes, 300))
        paths = [LinkPath(latency_s, line) for latency_s in (0, 0.01, 0.2)]
        flows: list[Flow] = [path.open() for path in paths]
        offered = [0, 0, 0]
        packets: list[Packet] = []
        agenda: list[tuple[int, int, int, int]] = [
            (now_ns, 0, which, size) for now_ns, which, size in sends
        ]
        for time_ns in stall_times[:6]:
            agenda += [(time_ns, 1, time_ns % 3, 0), (time_ns + 10**7, 2, time_ns % 3, 0)]
        heapq.heapify(agenda)
        now_ns = 0
        first_ns = min(now_ns for now_ns, *_ in sends)
        while True:
            due_ns = line.next_ns()
            if agenda and (due_ns is None or agenda[0][0] <= due_ns):
                now_ns, kind, which, size = heapq.heappop(agenda)
                if kind == 0:
                    offered[which] += size
                    line.offer(now_ns, flows[which], size)
                elif kind == 1:
                    paths[which].stall()
                else:
                    paths[which].resume(now_ns)
            elif due_ns is not None:
                now_ns = due_ns
            else:
                break
            for packet in line.transmit(now_ns):
                self.assertEqual(packet.start_ns, now_ns)
                self.assertFalse(packet.flow.path.stalled)
                packets.append(packet)
        for flow, expected in zip(flows, offered, strict=True):
            mine = [packet for packet in packets if packet.flow is flow]
            self.assertEqual(sum(packet.size_bytes for packet in mine), expected)
            arrivals = [packet.arrival_ns for packet in mine]
            self.assertEqual(arrivals, sorted(arrivals))
        for packet in packets:
            took_ns = packet.arrival_ns - packet.start_ns - packet.flow.path.latency_ns
            self.assertGreaterEqual(took_ns + 1, packet.size_bytes * NANOSECONDS // rate)
        # The rate: no window between the start of one packet and the end of another holds more.
        self.assertGreaterEqual(packets[0].start_ns, first_ns)
        for begin in range(0, len(packets), max(1, len(packets) // 10)):
            sent = 0
            for packet in packets[begin:]:
                sent += packet.size_bytes
                end_ns = packet.arrival_ns - packet.flow.path.latency_ns
                self.assertGreaterEqual(
                    (end_ns - packets[begin].start_ns + 1) * rate, sent * NANOSECONDS
                )
