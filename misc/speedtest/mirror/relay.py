"""
The link in front of web servers: it adds a round trip and costs next to no processor time.

    python -m misc.speedtest.mirror.relay RTT_S HOST:PORT... [--slow-start] [--bytes-per-s N]

prints a JSON list of ports, one for each target, and runs until its standard input ends. A relay that
passes half a gigabyte through Twisted takes a processor's second or two, on a machine that has two for
everybody: it would be what is measured. So nothing is done here but to wait, in large pieces.

A connection's handshake takes a round trip, too. ``--slow-start``: a sender begins with ten segments under
way, and may have as many more as were acknowledged, so that what is under way doubles each round trip.
``--bytes-per-s``: of all connections together, towards clients.
"""

from __future__ import annotations

import argparse
import errno
import json
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

LOOPBACK = "127.0.0.1"
LINE_BYTES = 16 << 20
"""Under way in one direction of a connection, and not taken by the receiver."""

TAKEN_BYTES = 256 << 10
_taken = memoryview(bytearray(TAKEN_BYTES))
FIRST_WINDOW_BYTES = 10 * 1460
RATED_S = 0.002
"""A line of limited rate takes no more at once than it carries in so long."""

_BLOCKED = frozenset({errno.EAGAIN, errno.EINTR})


class Link:
    """
    What all connections share.

    Args:
        rtt_s: round trip.
        slow_start: see above.
        bytes_per_s: towards clients; None: no limit.
    """

    def __init__(self, rtt_s: float, slow_start: bool, bytes_per_s: float | None) -> None:
        self.delay_s = rtt_s / 2
        self.slow_start = slow_start
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        self.poll = select.epoll()
        self.callbacks: dict[int, Callable[[int], None]] = {}
        # Each waits equally long in its queue, so that each queue is in the order of time.
        self._due: deque[tuple[float, Callable[[int], None], int]] = deque()
        self._acknowledged: deque[tuple[float, Callable[[int], None], int]] = deque()
        self._over = False

    def after_delay(self, due_s: float, then: Callable[[int], None], size: int) -> None:
        """Call something when what is under way has arrived."""
        self._due.append((due_s, then, size))

    def after_round_trip(self, due_s: float, then: Callable[[int], None], size: int) -> None:
        """Call something when it is known to have arrived."""
        self._acknowledged.append((due_s, then, size))

    def stop(self, _event: int) -> None:
        """Have ``run`` return."""
        self._over = True

    def run(self) -> None:
        """Relay until told to stop."""
        while not self._over:
            now_s = time.monotonic()
            for queue in (self._due, self._acknowledged):
                while queue and queue[0][0] <= now_s:
                    _, then, size = queue.popleft()
                    then(size)
            ahead_s = [queue[0][0] for queue in (self._due, self._acknowledged) if queue]
            wait_s = max(0.0, min(ahead_s) - time.monotonic()) if ahead_s else None
            select.select([self.poll], [], [], wait_s)  # epoll itself counts in milliseconds
            for number, event in self.poll.poll(0):
                callback = self.callbacks.get(number)
                if callback is not None:
                    callback(event)


class Direction:
    """From one socket to another."""

    def __init__(self, pair: Pair, source: socket.socket, sink: socket.socket, down: bool) -> None:
        self._pair = pair
        self._link = pair.link
        self._source = source
        self._sink = sink
        self._rate = pair.link.bytes_per_s if down else None
        self._waiting: deque[bytes] = deque()  # under way, and arrived
        self._arrived = 0  # how many of them
        self._held_bytes = self._unacknowledged_bytes = 0
        self._window = FIRST_WINDOW_BYTES if self._link.slow_start else LINE_BYTES
        self._ended = False

    @property
    def reads(self) -> bool:
        """Whether there is room for more."""
        in_flight = self._unacknowledged_bytes if self._link.slow_start else self._held_bytes
        return not self._ended and in_flight < self._window and self._held_bytes < LINE_BYTES

    @property
    def writes(self) -> bool:
        """Whether something waits for the receiver."""
        return self._arrived > 0

    def take(self) -> None:
        """Put what was sent on its way."""
        link = self._link
        room = TAKEN_BYTES
        if link.slow_start:
            room = min(room, self._window - self._unacknowledged_bytes)
        if self._rate is not None:
            room = min(room, max(4096, int(self._rate * RATED_S)))
        # Into one buffer for all: one made for each would be given back to the system, and asked for again.
        data = bytes(_taken[: self._source.recv_into(_taken, room)])
        now_s = max(time.monotonic(), self._pair.ready_s)
        if self._rate is not None:
            link.free_s = now_s = max(link.free_s, now_s) + len(data) / self._rate
        self._ended = not data
        self._waiting.append(data)
        self._held_bytes += len(data)
        link.after_delay(now_s + link.delay_s, self._arrive, len(data))
        if link.slow_start and data:
            self._unacknowledged_bytes += len(data)
            link.after_round_trip(now_s + 2 * link.delay_s, self._acknowledge, len(data))

    def _arrive(self, _size: int) -> None:
        if not self._pair.closed:
            self._arrived += 1
            self._pair.guarded(self.give)

    def _acknowledge(self, size: int) -> None:
        self._unacknowledged_bytes -= size
        self._window += size
        if not self._pair.closed:
            self._pair.watch()

    def give(self) -> None:
        """Hand over what has arrived."""
        while self._arrived:
            data = self._waiting[0]
            if not data:
                self._arrived -= 1
                self._waiting.popleft()
                self._sink.shutdown(socket.SHUT_WR)
                self._pair.ended()
                return
            size = self._sink.send(data)
            self._held_bytes -= size
            if size < len(data):
                self._waiting[0] = data[size:]
                return
            self._waiting.popleft()
            self._arrived -= 1


class Pair:
    """One connection: the client's, and ours to the server."""

    def __init__(self, link: Link, client: socket.socket, target: tuple[str, int]) -> None:
        self.link = link
        self.closed = False
        self.ready_s = time.monotonic() + 2 * link.delay_s
        self._ends = 0
        self._client = client
        self._server = socket.socket()
        self._masks: dict[int, int] = {}
        try:
            self._server.connect(target)
        except OSError:
            client.close()
            self._server.close()
            self.closed = True
            return
        for each in (self._client, self._server):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._up = Direction(self, self._client, self._server, down=False)
        self._down = Direction(self, self._server, self._client, down=True)
        for sock, reader, writer in (
            (self._client, self._up, self._down),
            (self._server, self._down, self._up),
        ):
            self._masks[sock.fileno()] = 0
            link.poll.register(sock.fileno(), 0)
            link.callbacks[sock.fileno()] = self._caller(reader, writer)
        self.watch()

    def _caller(self, reader: Direction, writer: Direction) -> Callable[[int], None]:
        def serve() -> None:
            if reader.reads:
                reader.take()

        def call(event: int) -> None:
            if event & select.EPOLLOUT:
                self.guarded(writer.give)
            if event & ~select.EPOLLOUT and not self.closed:
                if event & select.EPOLLERR:
                    self.close()
                else:
                    self.guarded(serve)

        return call

    def guarded(self, step: Callable[[], None]) -> None:
        """Do something; a connection that breaks is closed on both sides."""
        try:
            step()
        except OSError as error:
            if error.errno not in _BLOCKED:
                self.close()
        if not self.closed:
            self.watch()

    def ended(self) -> None:
        """One direction is over."""
        self._ends += 1
        if self._ends == 2:
            self.close()

    def watch(self) -> None:
        """Ask to be told of what there is to do."""
        for sock, reader, writer in (
            (self._client, self._up, self._down),
            (self._server, self._down, self._up),
        ):
            mask = (select.EPOLLIN if reader.reads else 0) | (
                select.EPOLLOUT if writer.writes else 0
            )
            if mask != self._masks[sock.fileno()]:
                self._masks[sock.fileno()] = mask
                self.link.poll.modify(sock.fileno(), mask)

    def close(self) -> None:
        """Let go of both."""
        if self.closed:
            return
        self.closed = True
        for sock in (self._client, self._server):
            self.link.callbacks.pop(sock.fileno(), None)
            self.link.poll.unregister(sock.fileno())
            sock.close()


def listen(link: Link, host: str, port: int, at: int = 0) -> int:
    """Relay to a server, at a port or at any that is free; returns the port."""
    listening = socket.create_server((LOOPBACK, at), backlog=1024)
    listening.setblocking(False)

    def accept(_event: int) -> None:
        with suppress(BlockingIOError):
            Pair(link, listening.accept()[0], (host, port))

    link.poll.register(listening.fileno(), select.EPOLLIN)
    link.callbacks[listening.fileno()] = accept
    number: int = listening.getsockname()[1]
    return number


def main() -> None:
    """Be the relay."""
    parser = argparse.ArgumentParser(description="The link that web servers are behind.")
    parser.add_argument("rtt_s", type=float)
    parser.add_argument("targets", nargs="+", metavar="HOST:PORT")
    parser.add_argument("--slow-start", action="store_true")
    parser.add_argument("--bytes-per-s", type=float)
    parser.add_argument("--also-at", type=int, metavar="PORT", help="of the first target")
    options = parser.parse_args()
    link = Link(options.rtt_s, options.slow_start, options.bytes_per_s)
    ports = []
    for target in options.targets:
        host, _, port = target.rpartition(":")
        ports.append(listen(link, host, int(port)))
        if options.also_at is not None and len(ports) == 1:
            listen(link, host, int(port), options.also_at)
    link.poll.register(sys.stdin.fileno(), select.EPOLLIN)
    link.callbacks[sys.stdin.fileno()] = link.stop
    print(json.dumps(ports), flush=True)
    link.run()


if __name__ == "__main__":
    main()
