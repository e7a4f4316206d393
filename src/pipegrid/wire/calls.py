"""
Calls over Foolscap that are put together at once: small ones, of numbers and strings.

Foolscap asks an object's adapter for each argument, a generator for each token, and hands the transport each
byte of a token's number: 39 writes for four calls, which are a small share, and with the checking of what we
ourselves are about to send nearly half of what such a share costs a client. A call of the kinds of arguments
below is one string here, the same bytes; everything else, and whatever comes while Foolscap is sending, goes
Foolscap's way, so that the order is that of the calls.

Source: Foolscap 24.9's documentation ("specifications/banana" and "specifications/pb"), and what it sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipegrid.wire.banana import CLOSE, INT, LONGINT, OPEN, STRING, VOCAB

MAX_CALL_BYTES = 128 * 1024
"""Of a call's strings; the time that longer ones take is spent on their bytes."""

_END_OF_SMALL = 1 << 31


class Introduced:
    """An object of ours that the other end knows already, as an argument of a call."""

    __slots__ = ("clid",)

    def __init__(self, clid: int) -> None:
        self.clid = clid


def can_pack(arguments: tuple[Any, ...]) -> bool:
    """
    Return whether a call with these arguments can be packed.

    Args:
        arguments: ``bytes``, ``int`` from 0, a ``set`` of such, or ``Introduced``; ``MAX_CALL_BYTES`` in all.
    """
    size = 0
    for each in arguments:
        kind = type(each)
        if kind is bytes:
            size += len(each)
        elif kind is set:
            if not all(type(item) is int and item >= 0 for item in each):
                return False
        elif kind is not Introduced and (kind is not int or each < 0):
            return False
    return size <= MAX_CALL_BYTES


def pack_call(
    words: Mapping[bytes, int],
    opened: int,
    request_id: int,
    clid: int,
    method: bytes,
    arguments: tuple[Any, ...],
) -> tuple[bytes, int]:
    """
    Return a call as it is sent, and how many objects are opened after it.

    Args:
        words: what is abbreviated on this connection, and by which number.
        opened: how many objects were opened on the connection before.
        request_id: by which the answer will name it.
        clid: of the object that is called, at the other end.
        arguments: such that they ``can_pack``.
    """
    out = bytearray()
    call = opened
    _open(out, words, opened, b"call")
    _integer(out, request_id)
    _integer(out, clid)
    _string(out, words, method)
    _open(out, words, opened + 1, b"arguments")
    _integer(out, len(arguments))
    opened += 2
    for each in arguments:
        if type(each) is bytes:
            _string(out, words, each)
        elif type(each) is int:
            _integer(out, each)
        else:
            named = type(each) is Introduced
            _open(out, words, opened, b"my-reference" if named else b"set")
            for item in (each.clid,) if named else each:
                _integer(out, item)
            _token(out, opened, CLOSE)
            opened += 1
    _token(out, call + 1, CLOSE)
    _token(out, call, CLOSE)
    return bytes(out), opened


def _token(out: bytearray, number: int, kind: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F)
        number >>= 7
    out.append(number)
    out.append(kind)


def _integer(out: bytearray, value: int) -> None:
    if value < _END_OF_SMALL:
        _token(out, value, INT)
    else:
        data = value.to_bytes((value.bit_length() + 7) // 8, "big")
        _token(out, len(data), LONGINT)
        out += data


def _string(out: bytearray, words: Mapping[bytes, int], value: bytes) -> None:
    if value in words:
        _token(out, words[value], VOCAB)
    else:
        _token(out, len(value), STRING)
        out += value


def _open(out: bytearray, words: Mapping[bytes, int], number: int, name: bytes) -> None:
    _token(out, number, OPEN)
    _string(out, words, name)
