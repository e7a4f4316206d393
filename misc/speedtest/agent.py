"""
How many 200-byte GETs a second does one connection carry?

``PipelinedAgent`` (with ``readBody``, as Twisted programs do) and its raw path, against Twisted's own
``Agent`` on one persistent connection, at several round-trip times, against two servers in a process of
their own: a canned responder, which is never the limit, and ``twisted.web``'s ``Site``.

    python misc/speedtest/agent.py [--rtt-ms 0 20] [--seconds 1] [--repeat 5] [--tiny]

Variants alternate (A B A B); what is printed is the median and the spread of the repetitions, one JSON
object per line, and its ratio to Twisted's ``Agent`` in the same run. The ceiling beside it is a client that
writes ready-made requests and counts bytes. Every body is compared.

The round trip is made in the server's process: what arrives and what leaves is each delayed by half of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.python.failure import Failure
from twisted.web.client import Agent, HTTPConnectionPool, readBody
from twisted.web.resource import Resource
from twisted.web.server import Site

from pipegrid.http11 import Limits, PipelinedAgent, RawRequest

BODY = bytes(range(200))
ANSWER = (
    b"HTTP/1.1 200 OK\r\nServer: canned\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
    b"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
CONCURRENT = 256  # requests a pipelining client has outstanding; enough for 12 000/s at 20 ms

reactor: Any = installed_reactor


# The server's process.


class CannedResponder(Protocol):
    """Answers every empty line; its clients send no bodies."""

    def connectionMade(self) -> None:
        self._tail = b""

    def dataReceived(self, data: bytes) -> None:
        data = self._tail + data
        self._tail = data[-3:]
        count = data.count(b"\r\n\r\n")
        if count:
            if data.endswith(b"\r\n\r\n"):
                self._tail = b""
            assert self.transport is not None
            self.transport.write(ANSWER * count)


class Hello(Resource):
    """The same answer, by twisted.web."""

    isLeaf = True

    def render_GET(self, request: Any) -> bytes:
        request.setHeader(b"content-type", b"application/octet-stream")
        return BODY


class Delayed(ProtocolWrapper):
    """A line with latency and no other limit, both ways, in order."""

    def __init__(self, factory: Any, wrapped: Any) -> None:
        super().__init__(factory, wrapped)
        self._later: deque[Callable[[], None]] = deque()

    def _delay(self, what: Callable[[], None]) -> None:
        self._later.append(what)
        reactor.callLater(DELAY_S, lambda: self._later.popleft()())

    def dataReceived(self, data: bytes) -> None:
        self._delay(lambda: ProtocolWrapper.dataReceived(self, data))

    def write(self, data: bytes) -> None:
        self._delay(lambda: ProtocolWrapper.write(self, data))

    def writeSequence(self, data: Any) -> None:
        self.write(b"".join(data))

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._delay(lambda: ProtocolWrapper.connectionLost(self, reason))


DELAY_S = 0.0


def serve(kind: str, rtt_ms: float) -> None:
    """Listen, say where, and answer until standard input ends."""
    global DELAY_S
    DELAY_S = rtt_ms / 2000
    factory: Any = Factory.forProtocol(CannedResponder) if kind == "canned" else Site(Hello())
    if DELAY_S:
        factory = WrappingFactory(factory)
        factory.protocol = Delayed
    port = reactor.listenTCP(0, factory, interface="127.0.0.1")
    print(port.getHost().port, flush=True)
    reactor.callInThread(lambda: (sys.stdin.read(), reactor.callFromThread(reactor.stop)))
    reactor.run(installSignalHandlers=False)


# The clients. Each returns a function that makes one request and checks its answer.

Client = Callable[[], "Deferred[None]"]


def check(body: bytes) -> None:
    """No figure for wrong bytes."""
    if body != BODY:
        raise AssertionError(f"wrong body: {body!r}")


def twisted_agent(port: int) -> tuple[Client, Callable[[], Any]]:
    """Twisted's own."""
    pool = HTTPConnectionPool(reactor, persistent=True)
    pool.maxPersistentPerHost = 1
    agent = Agent(reactor, pool=pool)
    uri = b"http://127.0.0.1:%d/data" % port

    def once() -> Deferred[None]:
        return agent.request(b"GET", uri).addCallback(readBody).addCallback(check)

    return once, pool.closeCachedConnections


def pipelined_agent(port: int) -> tuple[Client, Callable[[], Any]]:
    """Ours, with the same face."""
    agent = PipelinedAgent(
        reactor, limits=Limits(max_connections=1, max_requests_in_flight=CONCURRENT)
    )
    uri = b"http://127.0.0.1:%d/data" % port

    def once() -> Deferred[None]:
        return agent.request(b"GET", uri).addCallback(readBody).addCallback(check)

    return once, agent.close


def raw_requests(port: int) -> tuple[Client, Callable[[], Any]]:
    """Ours, without it."""
    agent = PipelinedAgent(
        reactor, limits=Limits(max_connections=1, max_requests_in_flight=CONCURRENT)
    )
    pool = agent.pool_for(b"http://127.0.0.1:%d/" % port)
    request = RawRequest(b"GET /data HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")

    def once() -> Deferred[None]:
        return pool.request(request).addCallback(lambda answer: check(answer.body))

    return once, agent.close


async def rate(client: Client, concurrent: int, seconds: float) -> float:
    """Requests a second, with so many outstanding all the time."""
    count = 0
    end = time.monotonic() + seconds

    async def one_after_another() -> None:
        nonlocal count
        while time.monotonic() < end:
            await client()
            count += 1

    start = time.monotonic()
    await gatherResults([Deferred.fromCoroutine(one_after_another()) for _ in range(concurrent)])
    return count / (time.monotonic() - start)


class Flood(Protocol):
    """Ready-made requests out, answers counted by their length."""

    def __init__(self) -> None:
        self.left = 0
        self.done: Deferred[None] = Deferred()
        self.unit = len(ANSWER)

    def dataReceived(self, data: bytes) -> None:
        self.left -= len(data)
        if self.left <= 0:
            self.done.callback(None)


async def ceiling(port: int, seconds: float) -> float:
    """Requests a second of a client that does nothing but this, against the canned responder."""
    flood: Any = await HostnameEndpoint(reactor, "127.0.0.1", port).connect(
        Factory.forProtocol(Flood)
    )
    flood.transport.setTcpNoDelay(True)
    burst = b"GET /data HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * CONCURRENT
    count, start = 0, time.monotonic()
    while time.monotonic() < start + seconds:
        flood.left, flood.done = CONCURRENT * flood.unit, Deferred()
        flood.transport.write(burst)
        await flood.done
        count += CONCURRENT
    flood.transport.loseConnection()
    return count / (time.monotonic() - start)


VARIANTS = {
    "twisted": (twisted_agent, 1),
    "pipelined": (pipelined_agent, CONCURRENT),
    "raw": (raw_requests, CONCURRENT),
}


async def measure(kind: str, rtt_ms: float, seconds: float, repeat: int) -> None:
    """Print the figures for one server and one round trip."""
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", kind, "--rtt-ms", str(rtt_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        clients = {name: make(port) for name, (make, _) in VARIANTS.items()}
        rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for name, (_, concurrent) in VARIANTS.items():  # warm up
            await rate(clients[name][0], concurrent, min(0.5, seconds))
        for _ in range(repeat):
            for name, (_, concurrent) in VARIANTS.items():
                rates[name].append(await rate(clients[name][0], concurrent, seconds))
        if kind == "canned":
            rates["ceiling"] = [await ceiling(port, seconds) for _ in range(repeat)]
        for _, close in clients.values():
            await close()
    finally:
        server.communicate()
    baseline = statistics.median(rates["twisted"])
    for name, found in rates.items():
        median = statistics.median(found)
        figures = {
            "scenario": "agent",
            "server": kind,
            "rtt_ms": rtt_ms,
            "client": name,
            "requests_per_s": round(median),
            "lowest": round(min(found)),
            "highest": round(max(found)),
            "times_twisted": round(median / baseline, 1),
            "repeat": repeat,
            "seconds": seconds,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        }
        print(json.dumps(figures), flush=True)


def main() -> None:
    """Parse, then measure or serve."""
    sys.path.insert(0, str(Path(__file__).parents[2]))  # it is run as a file
    from misc import ending

    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rtt-ms", type=float, nargs="+", default=[0, 20])
    parser.add_argument("--servers", nargs="+", default=["canned", "site"])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    parser.add_argument("--profile", action="store_true", help="of PipelinedAgent, at 0 ms")
    parser.add_argument("--serve", choices=["canned", "site"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.rtt_ms[0])
        return
    if options.tiny:
        options.rtt_ms, options.seconds, options.repeat = [0], 0.05, 1

    async def run(_: Any) -> None:
        for kind in options.servers:
            for rtt_ms in options.rtt_ms:
                await measure(kind, rtt_ms, options.seconds, options.repeat)

    if options.profile:
        VARIANTS.pop("raw")
        options.servers, options.rtt_ms, options.repeat = ["canned"], [0], 1
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.enable()
        try:
            ending.run(run)
        finally:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    else:
        ending.run(run)


if __name__ == "__main__":
    main()
