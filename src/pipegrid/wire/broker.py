# mypy: disable-error-code="misc"
"""
Foolscap's connections with bounds: on negotiation, tokens, messages, references, and on what one turn may
take.

A ``BoundedBroker`` does with each token what Foolscap does, out of ``wire.banana``'s hands instead of its
own. What it adds, for clients and servers alike:

* **A message has an allowance**, counted as what it becomes in memory (``TOKEN_COST`` a token, and its
  bodies) before any of it is there. It begins with a few KiB, and grows when it is known what the message
  is: an answer to a call of ours, as much as that call may bring; a call of an object of ours,
  ``Bounds.call_cost``. A reference to something in the same message costs as much as all before it: it can
  be used as often.
* **Answers to nothing** end the connection. Objects that nobody needs are refused: gifts (references to
  third parties, for which a tub would connect to where it is told), copies of objects other than failures,
  our own objects coming back, methods.
* **Turns.** After ``Bounds.turn_tokens`` tokens or ``TURN_CALLS`` calls the others have their turn.
  Meanwhile nothing is read from the socket; neither is it while ``MAX_CALLS`` calls are under way.
* **References** are given back when there is time, see ``givingback``.
* **Ends.** Whoever breaks a bound is told so, and is gone ``GRACE_S`` later, whether it listens or not. All
  time is monotonic.

Not all methods of Foolscap's that are overridden here are documented; ``tests/wire/test_broker.py`` would
say if they were gone, and the fuzz target ``banana`` compares what both make of the same bytes.
"""

from __future__ import annotations

from typing import Any

from foolscap import eventual
from foolscap.broker import PBOpenRegistry, PBRootUnslicer
from foolscap.call import CallSlicer, FailureSlicer
from foolscap.slicer import UnslicerRegistry
from foolscap.slicers.tuple import TupleUnslicer
from foolscap.tokens import Violation
from twisted.internet.interfaces import IDelayedCall
from twisted.python.failure import Failure

from pipegrid.reactor.sockets import StallWatch
from pipegrid.wire.allowance import ANSWER_COST, Bounds, TooMuch
from pipegrid.wire.givingback import GivingBack
from pipegrid.wire.negotiation import GRACE_S
from pipegrid.wire.receiving import BoundedReceiver

MAX_REFERENCES = 16_384
"""To objects at the other end: some 16 MB."""

_VALUES = ("none", "boolean", "unicode", "list", "tuple", "dict", "set", "immutable-set")
_OPEN_TYPES = (*_VALUES, "reference", "arguments", "my-reference")


class WholeTuple(TupleUnslicer):
    """
    Takes a tuple that has all the parts that are declared.

    Foolscap's own takes one that ends early. Where it is an argument Foolscap looks at it once more before
    the call; nobody looks at an answer again.
    """

    def receiveClose(self) -> Any:
        if self.constraints is not None and len(self.list) < len(self.constraints):
            raise Violation(
                f"the tuple ends after {len(self.list)} of {len(self.constraints)} parts"
            )
        return super().receiveClose()


_KNOWN: dict[tuple[str, ...], Any] = {**UnslicerRegistry, **PBOpenRegistry, ("tuple",): WholeTuple}


class BoundedRoot(PBRootUnslicer):
    """Knows the objects that storage and introducers speak of, and no others."""

    openRegistries = [{(name,): _KNOWN[name,] for name in _OPEN_TYPES}]

    def open(self, opentype: tuple[str, ...]) -> Any:
        """Return what takes such an object's tokens; of copies only a failure's."""
        if opentype[0] == "copyable" and opentype[1:] not in ((), (FailureSlicer.classname,)):
            raise Violation("copies of objects are not taken")
        return super().open(opentype)


class BoundedBroker(BoundedReceiver):
    """
    One connection, after its negotiation; see above.

    Args:
        bounds: what differs between connections; the other arguments are Foolscap's.

    Attributes:
        stalls: what is to be stopped at its end, if the connection is watched.
    """

    unslicerClass = BoundedRoot
    stalls: StallWatch | None = None

    def __init__(self, *args: Any, bounds: Bounds | None = None, **kwargs: Any) -> None:
        super().__init__(*args, bounds=bounds, **kwargs)
        self._aborting: IDelayedCall | None = None
        self._unneeded = GivingBack(super().freeYourReference, lambda: bool(self.waitingForAnswers))

    # What Foolscap asks its broker for.

    def getObject(self, count: int) -> Any:
        """Return something in the same message; all of it is there once more."""
        self.charge(self.held_cost)
        return super().getObject(count)

    def getRequest(self, reqID: int) -> Any:
        """Return the call of ours that an answer is for."""
        request = self.waitingForAnswers.get(reqID)
        if request is None:
            raise TooMuch("it answered what nobody had asked")
        self._allowance.allow(getattr(request, "answer_cost", ANSWER_COST))
        return request

    def getMyReferenceByCLID(self, clid: int) -> Any:
        """Return the object of ours that a call is for; KeyError if there is none."""
        found = super().getMyReferenceByCLID(clid)
        if clid:
            self._allowance.allow(self.bounds.call_cost)
        return found

    def getTrackerForYourReference(self, clid: int, *args: Any, **kwargs: Any) -> Any:
        """Return what stands for an object of the other end's."""
        # Foolscap's way to say so; what is called by a name would be an assertion of its own.
        if clid < 0:
            raise TooMuch("it gave us a method in the place of an object")
        if len(self.yourReferenceByCLID) >= MAX_REFERENCES and clid not in self.yourReferenceByCLID:
            raise TooMuch(f"it gave us more than {MAX_REFERENCES} objects")
        return super().getTrackerForYourReference(clid, *args, **kwargs)

    def freeYourReference(self, tracker: Any, count: int) -> None:
        """An object of the other end's is not needed any more; it learns so when there is time."""
        if not self.disconnected:
            self._unneeded.later(tracker, count)

    def is_idle(self) -> bool:
        """Whether what is written to the transport now comes behind all that was asked to be sent."""
        root = self.rootSlicer
        return root.producingDeferred is not None and not root.sendQueue and not self.paused

    def send(self, obj: Any) -> Any:
        """Send a call or an answer; of a call, remember how large its answer may be."""
        if isinstance(obj, CallSlicer) and obj.reqID:
            request = self.waitingForAnswers.get(obj.reqID)
            if request is not None:
                request.answer_cost = self.bounds.answer_cost(obj.methodname, tuple(obj.args))
        return super().send(obj)

    def scheduleCall(self, delivery: Any, ready_deferred: Any) -> None:
        """Have a call of the other end carried out, in its turn."""
        self._turn_calls += 1
        super().scheduleCall(delivery, ready_deferred)

    def doNextCall(self) -> None:
        """Carry out the next call."""
        super().doNextCall()
        self.wake()

    def _callFinished(self, res: Any, delivery: Any) -> None:
        super()._callFinished(res, delivery)
        self.call_ended(delivery)

    def callFailed(self, f: Any, reqID: int, delivery: Any = None) -> None:
        """Tell the other end that a call failed."""
        super().callFailed(f, reqID, delivery)
        f.value.__traceback__ = None  # its frames hold what the call was given
        f.cleanFailure()
        if delivery is not None:
            self.call_ended(delivery)

    def call_ended(self, delivery: Any) -> None:
        """A call was carried out."""
        delivery.allargs.args, delivery.allargs.kwargs = [], {}
        self.wake()

    # Time, and the end.

    def keepaliveTimerFired(self) -> None:
        """Ask the other end whether it is there, after a long silence."""
        self.keepaliveTimer = None
        if self.seconds() - self.dataLastReceivedAt > self.keepaliveTimeout:
            self.sendPING()
        self.keepaliveTimer = eventual.reactor.callLater(
            self.keepaliveTimeout + 1, self.keepaliveTimerFired
        )

    def disconnectTimerFired(self) -> None:
        """Give the connection up, after a longer one."""
        self.disconnectTimer = None
        if self.seconds() - self.dataLastReceivedAt > self.disconnectTimeout:
            self.connectionTimedOut()
            return
        self.disconnectTimer = eventual.reactor.callLater(
            self.disconnectTimeout + 1, self.disconnectTimerFired
        )

    def refuse(self, reason: str, tell: bool = True) -> None:
        """End the connection, as the other end broke a bound; what is unanswered fails for that reason."""
        if self.connectionAbandoned:
            return
        self.connectionAbandoned = True
        self.refused(reason)
        if tell:
            self.sendError(reason)
        self.shutdown(Failure(TooMuch(reason)))

    def refused(self, reason: str) -> None:
        """It is known why the connection ends."""

    def shutdown(self, why: Failure, fireDisconnectWatchers: bool = True) -> None:
        """End the connection, soon, and whether or not the other end takes what was sent."""
        self._tokens.clear()
        self._read(not self.connectionAbandoned)  # of those who were refused nothing more is read
        self.connectionAbandoned = True
        if self._aborting is None and not self.disconnected:
            self._aborting = eventual.reactor.callLater(GRACE_S, self._abort)
        super().shutdown(why, fireDisconnectWatchers)

    def finish(self, why: Failure) -> None:
        """Nothing is asked any more, though the connection may not be gone yet."""
        self._unneeded.stop()
        super().finish(why)

    def _abort(self) -> None:
        self._aborting = None
        abort = getattr(self.transport, "abortConnection", None)
        if abort is not None:
            abort()

    def connectionLost(self, why: Failure) -> None:
        """All is over: keep nothing that was large."""
        self.connectionAbandoned = True
        if self._aborting is not None:
            self._aborting.cancel()
            self._aborting = None
        if self.stalls is not None:
            self.stalls.stop()
        super().connectionLost(why)
        self._tokens.clear()
        self._body = None
        del self.receiveStack[1:]
        self.inboundDeliveryQueue = []
