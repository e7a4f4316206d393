"""
The arithmetic of links, for virtual time and real sockets: it computes delivery times from times and byte
counts.
"""

from __future__ import annotations

from collections import deque

import attrs

NANOSECONDS = 1_000_000_000

MIN_PACKET_BYTES = 1460
MAX_PACKET_BYTES = 1 << 16
_TURNS_A_SECOND = 100


def to_ns(seconds: float) -> int:
    """Return the nearest whole number of nanoseconds."""
    return round(seconds * NANOSECONDS)


def to_seconds(ns: int) -> float:
    return ns / NANOSECONDS


@attrs.frozen
class Packet:
    """
    The bytes that a bottleneck sends in one turn of a flow.

    Attributes:
        flow: the flow to which the bytes belong.
        size_bytes: how many bytes.
        start_ns: when the first byte enters the bottleneck.
        end_ns: when the last byte has left the bottleneck.
        arrival_ns: when the last byte, and so the packet, is delivered.
    """

    flow: Flow
    size_bytes: int
    start_ns: int
    end_ns: int
    arrival_ns: int


class Bottleneck:
    """
    A serial bottleneck, shared by flows that send one packet each in turn. Call ``transmit`` at once after
    ``offer``, and at the times that ``next_ns`` returns.

    Sending whole writes in order of arrival would be simpler, but 4 MiB queued by one connection would delay
    the next 200 bytes of every other connection until all 4 MiB were sent. Real senders get comparable shares
    of a bottleneck, whatever their windows. A packet is what the bottleneck sends in about 10 ms, but at
    least 1460 B and at most 64 KiB: small enough for short waits, large enough for cheap simulation of fast
    links.

    Time is whole nanoseconds. The end of every packet is computed from the beginning of the busy period and
    the bytes sent since, with one division rounded up: errors do not add up, and no prefix of a busy period
    exceeds the rate.
    """

    def __init__(self, bytes_per_s: int | None = None, packet_bytes: int | None = None) -> None:
        """
        Args:
            bytes_per_s: at least 1; None for unlimited.
            packet_bytes: the most bytes that one flow sends in a turn; if None, chosen by the rate.
        """
        if bytes_per_s is not None and bytes_per_s < 1:
            raise ValueError(f"a link needs a rate of at least 1 byte a second, not {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self._rate = bytes_per_s
        self._fixed_packet_bytes = packet_bytes
        self._slowdowns: list[int] = []
        self._waiting: deque[Flow] = deque()
        # The busy period: when it began, and the bytes sent since.
        self._epoch_ns = 0
        self._epoch_bytes = 0

    def __repr__(self) -> str:
        rate = "infinite" if self._rate is None else f"{self._rate} B/s"
        return f"<Bottleneck {rate}, {len(self._waiting)} flows waiting>"

    @property
    def packet_bytes(self) -> int:
        """The most bytes that one flow sends in a turn."""
        if self._fixed_packet_bytes is not None:
            return self._fixed_packet_bytes
        if self._rate is None:
            return MAX_PACKET_BYTES
        return min(max(self._rate // _TURNS_A_SECOND, MIN_PACKET_BYTES), MAX_PACKET_BYTES)

    @property
    def free_ns(self) -> int:
        """The time when the last started packet has left the bottleneck."""
        if self._rate is None:
            return self._epoch_ns
        return self._epoch_ns - (-self._epoch_bytes * NANOSECONDS // self._rate)

    def copy(self, slowdowns: list[int]) -> Bottleneck:
        """Return an idle bottleneck of the same rate and packet size, slowed down by the largest factor."""
        line = Bottleneck(self.bytes_per_s, self._fixed_packet_bytes)
        for factor in slowdowns:
            line.slow_down(0, factor)
        return line

    def offer(self, now_ns: int, flow: Flow, size_bytes: int) -> None:
        """Queue bytes of a flow, after the bytes that the flow has queued already."""
        if size_bytes <= 0:
            return
        if flow.queued_bytes == 0:
            flow.ready_ns = now_ns
            if not flow.in_ring:
                flow.in_ring = True
                self._waiting.append(flow)
        flow.queued_bytes += size_bytes

    def transmit(self, now_ns: int) -> list[Packet]:
        """
        Start all packets that can start by now; return them in the order of their starts.

        If the call is late (real timers are late), packets start at the time when they should have started.
        """
        packets: list[Packet] = []
        waiting = self._waiting
        packet_bytes = self.packet_bytes
        skipped = 0
        while skipped < len(waiting) and self.free_ns <= now_ns:
            flow = waiting.popleft()
            if flow.queued_bytes == 0:
                flow.in_ring = False
                continue
            if flow.path.stalled:
                waiting.append(flow)
                skipped += 1
                continue
            skipped = 0
            packets.append(self._start(flow, min(flow.queued_bytes, packet_bytes)))
            if flow.queued_bytes:
                waiting.append(flow)
            else:
                flow.in_ring = False
        return packets

    def _start(self, flow: Flow, size_bytes: int) -> Packet:
        start_ns = max(self.free_ns, flow.ready_ns)
        if start_ns > self.free_ns or self._rate is None:
            self._epoch_ns = start_ns
            self._epoch_bytes = 0
        self._epoch_bytes += size_bytes
        flow.queued_bytes -= size_bytes
        end_ns = self.free_ns
        return Packet(flow, size_bytes, start_ns, end_ns, flow.arrival_ns(end_ns))

    def next_ns(self) -> int | None:
        """Return when ``transmit`` must be called again; None if no queued bytes can be sent."""
        if any(flow.queued_bytes and not flow.path.stalled for flow in self._waiting):
            return self.free_ns
        return None

    def slow_down(self, now_ns: int, factor: int) -> None:
        """Divide the rate by ``factor`` until ``speed_up``; of several factors the largest applies."""
        self._slowdowns.append(factor)
        self._apply_slowdowns(now_ns)

    def speed_up(self, now_ns: int, factor: int) -> None:
        """End one ``slow_down`` by this factor."""
        self._slowdowns.remove(factor)
        self._apply_slowdowns(now_ns)

    def _apply_slowdowns(self, now_ns: int) -> None:
        if self.bytes_per_s is None:
            return
        # A packet that is being sent keeps its rate, since its arrival time is already fixed.
        self._epoch_ns, self._epoch_bytes = max(now_ns, self.free_ns), 0
        self._rate = max(1, self.bytes_per_s // max(self._slowdowns, default=1))


class LinkPath:
    """
    One direction between two hosts: a bottleneck followed by a latency. Several paths may share a bottleneck.

    While a path is stalled, nothing enters it; bytes in flight still arrive.
    """

    def __init__(self, latency_s: float, line: Bottleneck, line_per_flow: bool = False) -> None:
        """
        Args:
            latency_s: one way, at least 0.
            line: the bottleneck; other paths may share it.
            line_per_flow: give every flow its own bottleneck with the rate of ``line``.
        """
        if latency_s < 0:
            raise ValueError(f"a latency cannot be negative: {latency_s}")
        self.line = line
        self._line_per_flow = line_per_flow
        self._base_latency_ns = to_ns(latency_s)
        self.latency_ns = self._base_latency_ns
        self._slowdowns: list[int] = []
        self._stalls = 0
        self._flows: dict[Flow, None] = {}

    @property
    def stalled(self) -> bool:
        """Whether a stall has not ended, so that nothing can enter."""
        return self._stalls > 0

    def open(self, owner: object = None) -> Flow:
        """Return a new flow over this path."""
        line = self.line.copy(self._slowdowns) if self._line_per_flow else self.line
        flow = Flow(self, line, owner)
        self._flows[flow] = None
        return flow

    def close(self, flow: Flow) -> None:
        """Remove a flow and its queued bytes."""
        flow.queued_bytes = 0
        self._flows.pop(flow, None)

    @property
    def lines(self) -> list[Bottleneck]:
        """The distinct bottlenecks of this path's flows."""
        return list({id(flow.line): flow.line for flow in self._flows}.values())

    def stall(self) -> None:
        """Let nothing enter until ``resume``. Each ``stall`` needs its own ``resume``."""
        self._stalls += 1

    def resume(self, now_ns: int) -> None:
        """End one stall. After the end of the last stall, the caller calls ``transmit`` of all ``lines``."""
        assert self._stalls > 0, "resume without stall"
        self._stalls -= 1
        if not self._stalls:
            for flow in self._flows:
                flow.ready_ns = now_ns

    def slow_down(self, now_ns: int, factor: int) -> None:
        """Multiply the latency, and divide the rate of the bottleneck, by ``factor`` until ``speed_up``."""
        self._slowdowns.append(factor)
        self._apply_slowdowns()
        for line in self._slowable():
            line.slow_down(now_ns, factor)

    def speed_up(self, now_ns: int, factor: int) -> None:
        """End one ``slow_down`` by this factor."""
        self._slowdowns.remove(factor)
        self._apply_slowdowns()
        for line in self._slowable():
            line.speed_up(now_ns, factor)

    def _apply_slowdowns(self) -> None:
        self.latency_ns = self._base_latency_ns * max(self._slowdowns, default=1)

    def _slowable(self) -> list[Bottleneck]:
        return self.lines if self._line_per_flow else [self.line]


@attrs.define(eq=False, repr=False)
class Flow:
    """
    One direction of one connection over a path. Its bytes arrive in order.

    Attributes:
        owner: any object, for the code that opened the flow.
        queued_bytes: bytes offered and not yet sent.
        ready_ns: since when the first queued byte could have been sent.
        last_arrival_ns: when the last packet sent so far arrives.
        in_ring: whether the bottleneck's queue contains the flow.
    """

    path: LinkPath
    line: Bottleneck
    owner: object = None
    queued_bytes: int = 0
    ready_ns: int = 0
    last_arrival_ns: int = 0
    in_ring: bool = False

    def arrival_ns(self, departure_ns: int) -> int:
        """
        Return when something that leaves the bottleneck at ``departure_ns`` arrives, and record this time.

        Also used for signals without a size, such as the end of the flow. Nothing overtakes earlier bytes
        when the latency becomes shorter.
        """
        self.last_arrival_ns = max(self.last_arrival_ns, departure_ns + self.path.latency_ns)
        return self.last_arrival_ns
