"""
Counting what is in a CBOR message before anything of it is built.

A byte on the wire may become a hundred in memory: eight megabytes of empty maps were 600, and seconds in
which nobody was served. So the heads of a message's items are walked first, which builds nothing and skips
strings by their lengths: a share of a megabyte is one step. Refused are

* more items than a message of its kind can have: numbers, strings, containers, tags, breaks, wherever;
* a map or a set of more than 256, which is what the protocols have. Keys may be chosen so that all have
  the same hash, and then building takes time with the square of their number;
* maps and sets of undeclared length, tags in other than their short forms, and strings that go on behind
  the end.

How deep they are nested is for the decoder to bound. What stands behind the message counts as well.

**A message of up to 1024 bytes is not walked**: it has no more items than bytes, and ordinary requests are
shorter. Longer ones take a tenth of a microsecond for each item.

**Large byte strings can be taken out** (``take_out``), so that they are in memory once: the walk gives views
of the message, and the decoder is given what is left, with tags in their places that nobody can send.

Source: RFC 8949, sections 3 and 3.4.
"""

from __future__ import annotations

from pipegrid.core.hashes import Buffer

UNSCANNED_BYTES = 1024
MAX_KEYS = 256
"""Of one map, and elements of one set: as many as there are share numbers."""

VIEW_BYTES = 4 * 1024
VIEW_TAG = 0x70676264
"""In the form of five bytes, which the walk refuses in what comes: of the protocols' tags none needs it."""

_SET_TAG = 258
_NO_STEP = 0
_UINT, _INT, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_ARGUMENT_BYTES = {24: 1, 25: 2, 26: 4, 27: 8}
_INDEFINITE = 31
_BYTES_OF_1, _BYTES_OF_2 = 0x58, 0x59  # byte strings with a length of one byte, and of two


def _step(initial: int) -> int:
    """Return how many bytes to the next head, or 0 if more has to be looked at."""
    major, detail = initial >> 5, initial & 31
    if detail < 24:
        return 1 + detail if major in (_BYTES, _TEXT) else 1
    if major in (_UINT, _INT, _ARRAY, _SIMPLE) and detail in _ARGUMENT_BYTES:
        return 1 + _ARGUMENT_BYTES[detail]
    if detail == _INDEFINITE and major in (_BYTES, _TEXT, _ARRAY, _SIMPLE):
        return 1  # the pieces follow, and a break
    return _NO_STEP


_STEPS = tuple(map(_step, range(256)))


def count_items(data: Buffer, max_items: int) -> int:
    """
    Return the number of items in a message, if it may be built.

    Raises:
        ValueError: more than ``max_items``, or one of the other things that are refused.
    """
    return _walk(data, max_items, [])


def take_out(data: Buffer, max_items: int) -> tuple[bytes, list[memoryview], int]:
    """
    Return a message without its large byte strings, those strings, and the number of items.

    In the place of the ``n``-th stands tag ``VIEW_TAG`` around the number ``n``.

    Args:
        data: must not change as long as the views are used.

    Raises:
        ValueError: as above.
    """
    large: list[tuple[int, int, int]] = []
    items = _walk(data, max_items, large)
    if not large:
        return bytes(data), [], items
    whole = memoryview(data).toreadonly()
    rest, at = bytearray(), 0
    for number, (head, _, end) in enumerate(large):
        rest += whole[at:head]
        rest += b"\xda%b\x1a%b" % (VIEW_TAG.to_bytes(4, "big"), number.to_bytes(4, "big"))
        at = end
    rest += whole[at:]
    return bytes(rest), [whole[begin:end] for _, begin, end in large], items


def _walk(data: Buffer, max_items: int, large: list[tuple[int, int, int]]) -> int:
    """Count; add head, begin and end of large byte strings to a list."""
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
            elif initial == _BYTES_OF_1:  # what most of a bundle is made of is looked at here
                at += 2 + data[at + 1]
            elif initial == _BYTES_OF_2 and data[at + 1] < VIEW_BYTES >> 8:
                at += 3 + (data[at + 1] << 8 | data[at + 2])
            else:
                at = _look(data, at, large)
        else:
            raise ValueError(f"a message of more than {max_items} items")
    except IndexError:
        pass
    raise ValueError("not a CBOR message: it ends within an item")


def _look(data: Buffer, at: int, large: list[tuple[int, int, int]]) -> int:
    """Return where the next head is, behind one that is not simple."""
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
            raise ValueError("not a CBOR message for us: a tag that nobody knows")
        if argument == _SET_TAG:
            _check_set(data, begin)
    return begin


def _check_set(data: Buffer, at: int) -> None:
    """Look at the array that a set's tag stands before; what is no array is for the decoder to refuse."""
    initial = data[at] if at < len(data) else 0
    if initial >> 5 == _ARRAY and initial & 31 >= 24:
        length = _ARGUMENT_BYTES.get(initial & 31)
        if length is None:
            raise ValueError("not a CBOR message for us: a set of undeclared length")
        _check_count(int.from_bytes(data[at + 1 : at + 1 + length], "big"), "set")


def _check_count(count: int, what: str) -> None:
    if count > MAX_KEYS:
        raise ValueError(f"a {what} that has {count} items; {MAX_KEYS} are allowed")
