"""
How a client calls what is at the other end of a ``BoundedBroker``: with ``calls`` where that can be.
"""

from __future__ import annotations

from typing import Any

from foolscap.call import PendingRequest
from foolscap.referenceable import Referenceable, RemoteReference
from foolscap.tokens import Violation
from twisted.internet.defer import Deferred

from pipegrid.wire.broker import BoundedBroker
from pipegrid.wire.calls import Introduced, can_pack, pack_call


def call_remote(reference: Any, method: str, *arguments: Any) -> Deferred[Any]:
    """
    Call a method of an object at the other end; what fires, or fails, is what its ``callRemote`` gives.

    What is sent in one piece was not held to the interface's constraints before: it is ours. Answers are.
    """
    answer: Deferred[Any] | None = None
    if type(reference) is RemoteReference and isinstance(reference.tracker.broker, BoundedBroker):
        answer = _call_at_once(reference, reference.tracker.broker, method, arguments)
    return reference.callRemote(method, *arguments) if answer is None else answer


def _call_at_once(
    reference: Any, broker: BoundedBroker, method: str, arguments: tuple[Any, ...]
) -> Deferred[Any] | None:
    if broker.disconnected or not broker.is_idle():
        return None
    method_info = getattr(reference, "_getMethodInfo", None)
    if method_info is None:  # of another release
        return None
    try:
        interface_name, _, schema = method_info(method)
    except Violation:
        return None
    trackers = [_tracker_of(broker, each) for each in arguments]
    to_send = tuple(
        each if tracker is None else Introduced(tracker.clid)
        for each, tracker in zip(arguments, trackers, strict=True)
    )
    if not can_pack(to_send):
        return None
    for tracker in filter(None, trackers):
        tracker.send()
    request_id = broker.newRequestID()
    request = PendingRequest(request_id, reference, interface_name, method)
    request.interfaceName, request.methodName = interface_name, method
    request.answer_cost = broker.bounds.answer_cost(method, arguments)
    if schema:
        request.setConstraint(schema.getResponseConstraint())
    broker.addRequest(request)
    message, broker.openCount = pack_call(
        broker.outgoingVocabulary,
        broker.openCount,
        request_id,
        reference.tracker.clid,
        method.encode("ascii"),
        to_send,
    )
    broker.transport.write(message)
    answer: Deferred[Any] = request.deferred
    return answer


def _tracker_of(broker: BoundedBroker, argument: Any) -> Any:
    """Return what counts how often the other end was sent an object of ours, if it knows it; or None."""
    if not isinstance(argument, Referenceable):
        return None
    return broker.myReferenceByPUID.get(argument.processUniqueID())
