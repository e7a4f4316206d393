"""
What a Foolscap connection makes of any bytes: the calls, and the answers to calls of ours, that Foolscap
itself makes of them, or fewer and the end.

Ours is fed in pieces, and Foolscap's own broker all at once. Nothing is raised; whatever ours hands on is
what Foolscap hands on, in order; if ours does not end the connection, and nothing was in it that is never
taken, it is all of that.
"""

from __future__ import annotations

from typing import Any

from foolscap import negotiate
from foolscap.api import Referenceable
from foolscap.broker import Broker
from foolscap.call import PendingRequest
from foolscap.referenceable import TubRef
from zope.interface import implementer

from misc.attack.foolscap import call, opened, string, token, value
from misc.fuzz.choices import Choices
from pipegrid.wire.banana_receiver import (
    ABORT,
    CLOSE,
    FIRST_COST,
    FLOAT,
    LONGINT,
    MAX_TOKENS,
    OPEN,
    PING,
    STRING,
    TOKEN_COST,
    VOCAB,
    Bounds,
)
from pipegrid.wire.foolscap_broker import BoundedBroker
from pipegrid.wire.foolscap_interfaces import ALLOCATED, RIStorageServer

CALL_COST = 64 * 1024
METHODS = "add_lease", "get_buckets", "add_lease", "allocate_buckets"
"""Of ours that are unanswered."""
NEVER_TAKEN = (b"their-reference", b"your-reference", b"copyable", b"decimal", b"-vocab")
_DECISION = negotiate.Negotiation().loopbackDecision()
_WORDS_NEVER_TAKEN = 9, 10, 16, 17, 18
"""The same in the initial vocabulary."""


@implementer(RIStorageServer)  # type: ignore[misc]
class Storage(Referenceable):  # type: ignore[misc]
    """Has the methods' shapes, and is never called."""


class Transport:
    """Goes nowhere."""

    connected = True

    def write(self, data: bytes) -> None:
        """Take it."""

    def loseConnection(self) -> None:
        """Take it."""


class Ours(BoundedBroker):
    """Its turns are taken here."""

    def turn_ended(self) -> None:
        """Nobody else wants one."""


def run(data: bytes) -> None:
    """Let the first bytes say how the rest is cut."""
    choices = Choices(data)
    cuts = [choices.byte() + 1 for _ in range(choices.below(8))]
    stream = choices.rest()
    bounds = Bounds(call_cost=CALL_COST, turn_tokens=7, allocated=ALLOCATED)
    ours = Ours(TubRef("a" * 32), _DECISION, bounds=bounds)
    theirs = Broker(TubRef("a" * 32), _DECISION)
    made, expected = _prepare(ours), _prepare(theirs)
    theirs.logReceiveErrors = False
    at = 0
    for cut in [*cuts, len(stream)]:
        ours.dataReceived(stream[at : at + cut])
        at += cut
        while _is_waiting(ours):
            ours.go_on()
        tokens = ours._tokens
        assert ours.held_cost <= max(CALL_COST, FIRST_COST) + TOKEN_COST or ours.connectionAbandoned
        assert tokens.waiting_bytes <= 9 or ours.connectionAbandoned, "tokens were left"
    ours._aborting.stop()
    ours.disconnected = (
        True  # objects that it was given are given back to nobody, and without a timer
    )
    try:
        theirs.dataReceived(stream)
    except TypeError:  # of Foolscap's own, where its complaint would be long
        theirs.connectionAbandoned = True
    odd = any(name in stream for name in NEVER_TAKEN)
    odd = odd or any(token(VOCAB, word) in stream for word in _WORDS_NEVER_TAKEN)
    if ours.connectionAbandoned or odd:
        rest = iter(expected)
        assert all(each in rest for each in made), "a call is not what Foolscap makes of it"
    else:
        if theirs.connectionAbandoned:  # over something that ours discards without a look
            made = made[: len(expected)]
        assert made == expected, "the calls are not those that Foolscap makes"
    assert len(stream) < MAX_TOKENS


def seeds() -> dict[str, bytes]:
    """Return what clients send, and some of what they do not."""
    secrets = value(b"r" * 32), value(b"c" * 32)
    canary = opened(b"my-reference", value(7), value(b""))
    numbers = opened(b"set", value(0), value(1))
    changes = {1: ([(0, 1, b"eq", b"x")], [(0, b"data"), (7, b"")], None)}
    write = (value(b"i" * 16), value((b"w" * 32,) * 3), value(changes), value([(0, 9)]))
    method = b"slot_testv_and_readv_and_writev"
    streams = {
        "version": call(1, 1, b"get_version") + token(PING, 5) + call(2, 1, b"get_version"),
        "name": call(1, 0, b"getReferenceByName", value(b"n" * 32)),
        "allocate": call(
            3, 1, b"allocate_buckets", value(b"i" * 16), *secrets, numbers, value(5), canary
        ),
        "write": call(4, 1, method, *write),
        "wrong-shape": call(5, 1, b"get_buckets", value(5)) + call(6, 1, b"get_version"),
        "aborted": token(OPEN, 1) + string(b"call") + value(9) + token(ABORT) + token(CLOSE, 1),
        "gift": call(7, 1, b"get_buckets", opened(b"their-reference", value(1), value(b"pb://"))),
        "too-long": token(STRING, 1 << 40),
        "nested": (token(OPEN, 1) + string(b"list")) * 12,
        "odd": opened(b"call", value(1), token(FLOAT, 0, bytes(8)), token(LONGINT, 2, b"xy")),
        "shared": call(
            8, 1, b"slot_readv", value(b"i" * 16), value([]), opened(b"reference", value(3))
        ),
        "answer": opened(b"answer", value(1), value(b"x")),
        "nothing": b"".join(map(_nothing, range(1, len(METHODS) + 1))) + call(9, 1, b"get_version"),
        "allocated": _allocated(4) + call(9, 1, b"get_version"),
        "allocated-twice": _allocated(4) + _allocated(4),
        "allocated-elsewhere": _allocated(4, tub=b"b") + call(9, 1, b"get_version"),
        "allocated-nowhere": _allocated(2) + _allocated(4),
        "nothing-twice": _nothing(3) + _nothing(3) + call(9, 1, b"get_version"),
    }
    return {name: bytes((3, 4, 40, 2)) + stream for name, stream in streams.items()}


def _prepare(broker: Any) -> list[tuple[Any, ...]]:
    """Have a broker offer the storage server as object 1, and say what it would call."""
    made: list[tuple[Any, ...]] = []

    def schedule(delivery: Any, ready: Any) -> None:
        broker.activeLocalCalls.pop(delivery.reqID, None)
        arguments = [_plain(each) for each in delivery.allargs.args]
        made.append(
            (delivery.reqID, delivery.methodname, arguments, sorted(delivery.allargs.kwargs))
        )

    broker.scheduleCall = schedule
    broker.makeConnection(Transport())
    storage = Storage()
    broker.getTrackerForMyReference(storage.processUniqueID(), storage).send()
    interface: Any = RIStorageServer
    for number, method in enumerate(METHODS, 1):
        request = PendingRequest(number, None, None, method)
        request.setConstraint(interface[method].getResponseConstraint())
        broker.addRequest(request)
        request.deferred.addCallbacks(
            lambda result, number=number: made.append((number, "answered", _plain(result))),
            lambda _: None,
        )
    return made


def _nothing(request: int) -> bytes:
    """Return the answer that says nothing, with the abbreviations that Foolscap uses."""
    none = token(OPEN, 2) + bytes((0, VOCAB)) + token(CLOSE, 2)
    return token(OPEN, 1) + token(VOCAB, 13) + value(request) + none + token(CLOSE, 1)


def _allocated(request: int, tub: bytes = b"a") -> bytes:
    """Return the answer that has allocated one share, as Foolscap sends it."""

    def opened_(place: int, word: int, *parts: bytes) -> bytes:
        return token(OPEN, place) + token(VOCAB, word) + b"".join(parts) + token(CLOSE, place)

    furl = b"pb://" + tub * 32 + b"@tcp:127.0.0.1:1/" + b"s" * 32
    writer = opened_(5, 15, value(7), value(b"RIBucketWriter"), value(furl))
    there, writers = opened_(3, 6), opened_(4, 3, value(3), writer)
    return opened_(1, 13, value(request), opened_(2, 5, there, writers))


def _plain(thing: Any) -> Any:
    if isinstance(thing, tuple):
        return tuple(map(_plain, thing))
    if isinstance(thing, dict):
        return {key: _plain(each) for key, each in thing.items()}
    return thing if isinstance(thing, (bytes, int, list, set)) else type(thing).__name__


def _is_waiting(broker: BoundedBroker) -> bool:
    return broker._yielded
