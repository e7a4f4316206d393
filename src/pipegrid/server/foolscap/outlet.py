"""What goes out to a Foolscap client: how large it will be."""

from __future__ import annotations

from typing import Any


def asked_bytes(delivery: Any) -> int:
    """Return how many bytes a call asks for at most, if it is one that may ask for many."""
    arguments = delivery.allargs.args
    if delivery.methodname == "read" and len(arguments) == 2:
        return int(arguments[1])
    if delivery.methodname == "slot_readv" and len(arguments) == 3:
        return sum(int(size) for _, size in arguments[2]) * (len(arguments[1]) or 1)
    return 0


def answer_bytes(results: Any) -> int:
    """Return how many bytes of share data are in an answer."""
    if isinstance(results, bytes):
        return len(results)
    if isinstance(results, (tuple, list)):
        return sum(map(answer_bytes, results))
    if isinstance(results, dict):
        return sum(map(answer_bytes, results.values()))
    return 0
