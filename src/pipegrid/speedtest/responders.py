"""
Responders of our own, in processes beside servers of our own: what raw TCP is measured with there.
"""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred, gatherResults

from pipegrid.reactor.together import as_deferred
from pipegrid.speedtest.children import ChildProcess, be_child, in_thread, start_child
from pipegrid.speedtest.probe import Responder
from pipegrid.speedtest.responder import (
    LOOPBACK,
    ResponderKey,
    ResponderService,
    ResponderSettings,
    make_key,
    make_token,
)

_NO_LIMIT_BYTES = 10**17
_NO_LIMIT_S = 10.0**6


@attrs.frozen
class RunningResponders:
    """
    Responders in child processes of this machine.

    Attributes:
        responders: where they are; behind a proxy, ``attrs.evolve(responder, port=…)``.
    """

    responders: list[Responder]
    _children: list[ChildProcess]

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes, in the order of the responders."""
        return [child.pid for child in self._children]

    def stop(self) -> Deferred[None]:
        """End them; fires when they have ended."""
        ending = gatherResults([child.stop() for child in self._children], consumeErrors=True)
        return ending.addCallback(lambda _: None)


@as_deferred
async def start_responders(reactor: Any, count: int) -> RunningResponders:
    """Start so many, each a process on 127.0.0.1, with a token made for them."""
    token = make_token()
    # One key for all: to make one takes longer than all else that they do before they are ready.
    key = await in_thread(reactor, make_key)
    job = {"token": token, "pem": key.pem.decode(), "spki_hash": key.spki_hash.hex()}
    starting = [start_child(reactor, "pipegrid.speedtest.responders", job) for _ in range(count)]
    children: list[ChildProcess] = []
    try:
        for each in starting:
            child = await each
            children.append(child)
    except BaseException:
        for each in starting:
            each.addErrback(lambda _: None)
            each.cancel()
        for child in children:
            await child.stop()
        raise
    responders = [Responder(LOOPBACK, int(child.said), token, key.spki_hash) for child in children]
    return RunningResponders(responders, children)


def _child(reactor: Any, job: Any) -> int:
    settings = ResponderSettings(LOOPBACK, 0, job["token"], _NO_LIMIT_BYTES, _NO_LIMIT_S)
    key = ResponderKey(job["pem"].encode(), bytes.fromhex(job["spki_hash"]))
    return ResponderService(reactor, settings, key=key).address[1]


if __name__ == "__main__":
    be_child(_child)
