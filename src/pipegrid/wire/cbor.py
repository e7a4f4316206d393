"""
CBOR with limits on bytes, items and depth, and with checks of types. The limits are checked before memory is
allocated.

Source: RFC 8949, sections 3 and 3.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import cbor2

from pipegrid.core.hashes import STORAGE_INDEX_BYTES, Buffer, StoredBytes
from pipegrid.wire.storage_messages import LeaseSecrets

# A byte on the wire may become a hundred bytes in memory: eight megabytes of empty maps took 600 megabytes,
# and blocked a server for seconds. So the heads of a message's items are counted first, which allocates
# nothing and skips strings by their lengths. The following are rejected:
#
# * more items than a message of its kind can have: numbers, strings, containers, tags, breaks;
# * a map or a set of more than 256 elements, the maximum in the protocols. A sender can choose keys with
#   the same hash, which take quadratic time;
# * maps and sets of undeclared length, tags in other than their short forms, and strings that end after the
#   message.
#
# The decoder limits the depth. Bytes after the message are counted as well. A message of up to 1024 bytes is
# not scanned: it has no more items than bytes, and most requests are shorter. In longer messages each item
# takes a tenth of a microsecond.
#
# Large byte strings can be replaced by views (``take_out``), so that they are in memory only once: the
# decoder gets the rest of the message, with tags in place of these strings. Such tags are rejected in input.
# If a message is too long for memory (``ReceivedMessage``), its byte strings of 256 bytes and more are
# written to a file as they arrive.

UNSCANNED_BYTES = 1024
MAX_KEYS = 256
"""The maximum number of elements in one map or set: the number of possible share numbers."""

VIEW_BYTES = 4 * 1024
KEPT_BYTES = 256
"""Byte strings of a ``ReceivedMessage`` that are shorter than this stay in memory."""
KEPT_PLACE_BYTES = 120
"""The memory that the placeholder of a byte string in the file takes, including the decoded placeholder."""
VIEW_TAG = 0x70676264
"""Tag of placeholders, encoded in five bytes. Input with such a tag is rejected: no protocol needs one."""

_SET_TAG = 258
_UINT, _INT, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_ARGUMENT_BYTES = {24: 1, 25: 2, 26: 4, 27: 8}
_INDEFINITE = 31
_BYTES_OF_1, _BYTES_OF_2 = 0x58, 0x59  # byte strings whose length takes one byte, or two


def _step(initial: int) -> int:
    """
    Return the number of bytes to the next head, given a head's first byte; 0 if more bytes must be examined.
    """
    major, detail = initial >> 5, initial & 31
    if detail < 24:
        return 1 + detail if major in (_BYTES, _TEXT) else 1
    if major in (_UINT, _INT, _ARRAY, _SIMPLE) and detail in _ARGUMENT_BYTES:
        return 1 + _ARGUMENT_BYTES[detail]
    if detail == _INDEFINITE and major in (_BYTES, _TEXT, _ARRAY, _SIMPLE):
        return 1  # the string's pieces follow, then a break
    return 0


_STEPS = tuple(map(_step, range(256)))


def count_items(data: Buffer, max_items: int) -> int:
    """
    Return the number of items in a message after checking that it may be decoded.

    Raises:
        ValueError: the message has more than ``max_items``, or is rejected for another reason.
    """
    return _walk(data, max_items, [])


def take_out(data: Buffer, max_items: int) -> tuple[bytes, list[memoryview], int]:
    """
    Return a message without its large byte strings, a list of these strings, and the number of items.

    String ``n`` of the list is replaced by tag ``VIEW_TAG`` around the number ``n``.

    Args:
        data: must not change as long as the views are used.

    Raises:
        ValueError: as ``count_items``.
    """
    large: list[tuple[int, int, int]] = []
    items = _walk(data, max_items, large)
    if not large:
        return bytes(data), [], items
    whole = memoryview(data).toreadonly()
    rest, at = bytearray(), 0
    for number, (head, _, end) in enumerate(large):
        rest += whole[at:head]
        rest += _place(number)
        at = end
    rest += whole[at:]
    return bytes(rest), [whole[begin:end] for _, begin, end in large], items


def _walk(data: Buffer, max_items: int, large: list[tuple[int, int, int]]) -> int:
    """Count items; append (head, begin, end) of each large byte string to ``large``."""
    at, end, steps = 0, len(data), _STEPS
    try:
        for items in range(max_items + 1):
            if at >= end:
                if at > end:
                    break
                return items
            initial = data[at]
            step = steps[initial]
            if step:
                at += step
            # Most items of a bundle are of the following kinds, so they are handled without a call.
            elif initial == _BYTES_OF_1:
                at += 2 + data[at + 1]
            elif initial == _BYTES_OF_2 and data[at + 1] < VIEW_BYTES >> 8:
                at += 3 + (data[at + 1] << 8 | data[at + 2])
            else:
                at = _next_head(data, at, large)
        else:
            raise ValueError(f"a message of more than {max_items} items")
    except IndexError:
        pass
    raise ValueError("not a CBOR message: it ends within an item")


def _next_head(data: Buffer, at: int, large: list[tuple[int, int, int]]) -> int:
    """Return the position of the next head, after an item for which ``_step`` is 0."""
    major, detail = data[at] >> 5, data[at] & 31
    length = _ARGUMENT_BYTES.get(detail)
    if length is None:
        what = "a map of undeclared length" if major == _MAP else "a head that means nothing"
        raise ValueError(f"not a CBOR message for us: {what}")
    begin = at + 1 + length
    argument = int.from_bytes(data[at + 1 : begin], "big")
    if major in (_BYTES, _TEXT):
        if argument > len(data) - begin:
            raise ValueError("not a CBOR message: a string that is longer than all of it")
        if major == _BYTES and argument >= VIEW_BYTES:
            large.append((at, begin, begin + argument))
        return begin + argument
    if major == _MAP:
        _check_count(argument, "map")
    elif major == _TAG:
        if length > 2:
            raise ValueError("not a CBOR message for us: an unknown tag")
        if argument == _SET_TAG:
            _check_set(data, begin)
    return begin


def _check_set(data: Buffer, at: int) -> None:
    """
    Check the length of the array after a set's tag; if there is no array, the decoder rejects the message.
    """
    initial = data[at] if at < len(data) else 0
    if initial >> 5 == _ARRAY and initial & 31 >= 24:
        length = _ARGUMENT_BYTES.get(initial & 31)
        if length is None:
            raise ValueError("not a CBOR message for us: a set of undeclared length")
        _check_count(int.from_bytes(data[at + 1 : at + 1 + length], "big"), "set")


class ReceivedMessage:
    """
    A message that arrives in pieces, and is never in memory as a whole.

    Args:
        keep: called with the bytes of all large byte strings, consecutively.
        most_items: returns how many items the received part of a message may have, given its length.

    Attributes:
        length: number of bytes received.
        items: number of items received.
        rest: the message without its large byte strings, as from ``take_out``.
        kept: (begin, end) of each large byte string in the bytes given to ``keep``.
    """

    def __init__(self, keep: Callable[[Buffer], None], most_items: Callable[[int], int]) -> None:
        self.length = 0
        self.items = 0
        self.rest = bytearray()
        self.kept: list[tuple[int, int]] = []
        self._keep = keep
        self._most_items = most_items
        self._kept_bytes = 0
        self._head = bytearray()  # the received part of an incomplete head
        self._string_bytes = 0  # bytes of the current string that have not arrived
        self._is_kept = False
        self._after_set = False  # whether the last item was a set's tag

    @property
    def cost_bytes(self) -> int:
        """The memory for the short strings, and for the placeholders of the large ones."""
        return 2 * len(self.rest) + KEPT_PLACE_BYTES * len(self.kept)

    def feed(self, data: Buffer) -> None:
        """
        Process the next bytes.

        Raises:
            ValueError: as ``count_items``. Errors of ``keep`` are raised, too.
        """
        view = memoryview(data)
        self.length += len(view)
        most, at = self._most_items(self.length), 0
        while at < len(view):
            if self._string_bytes:
                piece = view[at : at + self._string_bytes]
                self._string_bytes -= len(piece)
                at += len(piece)
                if self._is_kept:
                    self._keep(piece)
                else:
                    self.rest += piece
                continue
            initial = view[at]
            at += 1
            if self._head or self._after_set or _STEPS[initial] != 1:
                self._head.append(initial)
                if len(self._head) <= _ARGUMENT_BYTES.get(self._head[0] & 31, 0):
                    continue
                self._head_ended()
            else:
                self.rest.append(initial)
            self.items += 1
            if self.items > most:
                raise ValueError(f"a message of more than {most} items")

    def finish(self) -> None:
        """
        Check that the message is complete.

        Raises:
            ValueError: the message ends within an item.
        """
        if self._string_bytes or self._head:
            raise ValueError("not a CBOR message: it ends within an item")

    def _head_ended(self) -> None:
        head, self._head = self._head, bytearray()
        major, detail = head[0] >> 5, head[0] & 31
        if self._after_set:
            _check_set(head, 0)
        self._after_set = False
        if major in (_BYTES, _TEXT) and detail != _INDEFINITE:
            if detail > 27:
                raise ValueError("not a CBOR message for us: a head that means nothing")
            length = detail if detail < 24 else int.from_bytes(head[1:], "big")
            self._string_bytes = length
            self._is_kept = major == _BYTES and length >= KEPT_BYTES
            if self._is_kept:
                head = bytearray(_place(len(self.kept)))
                self.kept.append((self._kept_bytes, self._kept_bytes + length))
                self._kept_bytes += length
        elif not _STEPS[head[0]]:
            _next_head(head, 0, [])
            self._after_set = major == _TAG and int.from_bytes(head[1:], "big") == _SET_TAG
        self.rest += head

    def build(self, part: Callable[[int, int], Any]) -> Any:
        """
        Return the decoded message.

        Args:
            part: returns the value of a large byte string, given its begin and end in the bytes given to
                ``keep``.

        Raises:
            ValueError: as ``loads``.
        """

        def put_back(tag: Any, _: bool) -> Any:
            return part(*self.kept[tag.value]) if tag.tag == VIEW_TAG else tag

        return _build(self.rest, put_back)


def _place(number: int) -> bytes:
    """Return the placeholder of a large byte string."""
    return b"\xda%b\x1a%b" % (VIEW_TAG.to_bytes(4, "big"), number.to_bytes(4, "big"))


def _check_count(count: int, what: str) -> None:
    if count > MAX_KEYS:
        raise ValueError(f"a {what} that has {count} items; {MAX_KEYS} are allowed")


# Only the tags 258 (a set) and 2 (a big number) are accepted, so values are of JSON's types, bytes and sets;
# ``True`` is not accepted as 1. All functions raise ``ValueError`` with a text that names the place in the
# message; the caller turns the error into status 400 or ``ServerProtocolError``.

MAX_DEPTH = 8  # read-test-write, the deepest message, needs 6
MAX_UINT = (1 << 64) - 1
MAX_STATUS = 599
LEASE_SECRET_BYTES = 32


def _refuse_tag(*_: object) -> NoReturn:
    raise ValueError("a tag other than 258")


# All tags for which cbor2 has a decoder, except 258, 55799 (no meaning) and 2 (a big number): old servers
# send 2^64 bytes of space for "unknown".
_REFUSED_TAGS: dict[int, Callable[..., Any]] = dict.fromkeys(
    (0, 1, 3, 4, 5, 25, 28, 29, 30, 35, 36, 37, 43, 52, 54, 100, 256, 260, 261, 1004, 43000),
    _refuse_tag,
)


def dumps(value: Any) -> bytes:
    """Encode a message; Python sets become tag 258."""
    return cbor2.dumps(value)


def head(major: int, argument: int) -> bytes:
    """
    Return the head of an item, given its kind (0 a number, 2 bytes, 4 an array, 5 a map), and its value or
    length.
    """
    if argument < 24:
        return bytes([major << 5 | argument])
    for detail, length in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << 8 * length:
            return bytes([major << 5 | detail]) + argument.to_bytes(length, "big")
    raise ValueError(f"{argument} is too long")


def loads(data: Buffer, limit_bytes: int, max_items: int) -> Any:
    """
    Decode the message at the beginning of ``data``; bytes after the message are ignored.

    Memory and time are proportional to the message's real length, whatever lengths the message declares.

    Args:
        max_items: maximum number of numbers, strings, containers and tags that a message of this kind can
            have. Checked in messages of more than 1024 bytes.

    Raises:
        ValueError: the data are longer than the limit, not CBOR, nested deeper than 8, or have unknown tags
            or more items than allowed.
    """
    _check_length(data, limit_bytes)
    if len(data) > UNSCANNED_BYTES:
        count_items(data, max_items)
    return _build(data, None)


def scan_views(
    data: Buffer, limit_bytes: int, max_items: int
) -> tuple[int, int, Callable[[], Any]]:
    """
    Check a message as ``loads`` does, but leave the decoding to the returned function.

    Byte strings of 4 KiB and more become views of ``data``, which must not change as long as the views are
    used.

    Returns:
        the number of items, the number of bytes that are copied (0 for a short message), and a function that
            returns the decoded value.
    """
    _check_length(data, limit_bytes)
    if len(data) <= UNSCANNED_BYTES:
        return 0, 0, lambda: _build(data, None)
    rest, views, items = take_out(data, max_items)

    def put_back(tag: Any, _: bool) -> Any:
        return views[tag.value] if tag.tag == VIEW_TAG else tag

    return items, len(rest), lambda: _build(rest, put_back)


def _check_length(data: Buffer, limit_bytes: int) -> None:
    if len(data) > limit_bytes:
        raise ValueError(f"a message of {len(data)} bytes, where {limit_bytes} are allowed")


def _build(data: Buffer, tag_hook: Callable[..., Any] | None) -> Any:
    try:
        return cbor2.loads(
            data,
            max_depth=MAX_DEPTH,
            allow_duplicate_keys=False,
            semantic_decoders=_REFUSED_TAGS,
            tag_hook=tag_hook,
        )
    except Exception as error:  # any error, since constructors of decoded types raise others
        raise ValueError(f"not a CBOR message: {error}"[:200]) from error


def expect_map(value: Any, keys: frozenset[Any], where: str) -> dict[Any, Any]:
    """Return ``value`` if it is a map with exactly these keys."""
    if type(value) is not dict:
        raise ValueError(f"{where} is not a map")
    if value.keys() != keys:
        raise ValueError(f"{where} must have exactly the keys {sorted(keys)}")
    return value


def expect_uint(value: Any, where: str, maximum: int = MAX_UINT) -> int:
    """Return ``value`` if it is a whole number from 0 to ``maximum``."""
    if type(value) is not int or not 0 <= value <= maximum:
        raise ValueError(f"{where} is not a whole number from 0 to {maximum}")
    return value


def expect_uint_set(value: Any, where: str, max_count: int) -> frozenset[int]:
    """Return ``value`` if it is a set (tag 258, not an array) of at most ``max_count`` numbers."""
    if type(value) is not set and type(value) is not frozenset:
        raise ValueError(f"{where} is not a set (tag 258)")
    if len(value) > max_count:
        raise ValueError(f"{where} has {len(value)} items; {max_count} are allowed")
    for item in value:
        if type(item) is not int or not 0 <= item <= MAX_UINT:
            raise ValueError(f"{where} holds something that is not a whole number")
    return frozenset(value)


def expect_list(value: Any, where: str, max_count: int | None) -> list[Any]:
    """Return ``value`` if it is an array of at most ``max_count`` items."""
    if type(value) is not list:
        raise ValueError(f"{where} is not an array")
    if max_count is not None and len(value) > max_count:
        raise ValueError(f"{where} has {len(value)} items; {max_count} are allowed")
    return value


def expect_fields(value: Any, count: int, where: str) -> list[Any]:
    """Return ``value`` if it is an array of exactly ``count`` items."""
    fields = expect_list(value, where, count)
    if len(fields) != count:
        raise ValueError(f"{where} has {len(fields)} fields, not {count}")
    return fields


def expect_text(value: Any, where: str, min_length: int = 0) -> str:
    """Return ``value`` if it is a text string of at least ``min_length`` characters."""
    if type(value) is not str or len(value) < min_length:
        raise ValueError(f"{where} is not a text of {min_length} or more characters")
    return value


def expect_bytes(value: Any, where: str) -> bytes:
    """Return ``value`` if it is a byte string."""
    if type(value) is not bytes:
        raise ValueError(f"{where} is not a byte string")
    return value


def expect_sized(value: Any, where: str, size: int) -> bytes:
    """Return ``value`` if it is a byte string of ``size`` bytes."""
    if len(expect_bytes(value, where)) != size:
        raise ValueError(f"{where} has {len(value)} bytes, not {size}")
    return bytes(value)


def expect_status(value: Any) -> int:
    """Return ``value`` if it is the status of a final HTTP response."""
    status = expect_uint(value, "a status", MAX_STATUS)
    if status < 200:
        raise ValueError(f"{status} is not a status")
    return status


def expect_view(value: Any, where: str) -> bytes:
    """
    Return ``value`` if it is a byte string in any of three forms: bytes, a view from ``scan_views``, or a
    string in a file.
    """
    if type(value) is memoryview or isinstance(value, StoredBytes):
        return value  # type: ignore[return-value]
    return expect_bytes(value, where)


def expect_index(value: Any) -> bytes:
    """Return ``value`` if it is a storage index of 16 bytes; errors as in ``expect_sized``."""
    return expect_sized(value, "the storage index", STORAGE_INDEX_BYTES)


def expect_lease(renew: Any, cancel: Any) -> LeaseSecrets:
    """Return the two secrets of a lease, after checking them."""
    return LeaseSecrets(
        expect_sized(renew, "the lease renew secret", LEASE_SECRET_BYTES),
        expect_sized(cancel, "the lease cancel secret", LEASE_SECRET_BYTES),
    )


def expect_answers(value: Any, count: int, to_what: str) -> list[Any]:
    """Return ``value`` if it is an array of ``count`` answers."""
    answers = expect_list(value, "the answer", None)
    if len(answers) != count:
        raise ValueError(f"{len(answers)} answers to {count} {to_what}")
    return answers
