"""
Patterns of gitignore with the same results as git, in time linear in the length of a path. This module does
no input or output.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from pipegrid.core.text import printable
from pipegrid.errors import UsageError

MAX_PATTERNS = 10_000
MAX_PATTERN = 4096
MAX_PATTERN_BYTES = 1 << 20
"""Maximum bytes of all patterns; for each byte of a path, integers of about this many bits are computed."""

_MAX_STATES = 1024
_SLASH = 0x2F
_SPECIAL = b"*?[\\"

# A token of a pattern is a set of bytes, as an integer of 256 bits, or one of the values below.
_STAR = -1
"""Matches any bytes except slashes."""
_REST = -2
"""Any bytes."""
_LEVELS = -3
"""Matches any number of directories, including none, each with a slash."""

_ALL = (1 << 256) - 1
_NO_SLASH = _ALL & ~(1 << _SLASH)


class IgnorePatterns:
    """
    An ordered list of gitignore patterns; the last one that matches decides.

    All patterns together are one automaton, whose state is one integer with a bit for each position in each
    pattern. Each byte of a path moves all bits in one step, so the time for a pattern is at most proportional
    to its length, unlike with regular expressions for patterns such as ``*a*a*a*b``. The accepting bit of a
    pattern is higher than those of all earlier patterns, so the highest accepting bit belongs to the pattern
    that decides. Paths and names are bytes, as in git: ``?`` matches one byte.

    Git's rules have more cases than its manual says. If a pattern has a slash, its bytes before the first
    special byte are compared literally, and only the rest is a wildcard expression. So ``a/b**`` matches
    ``a/bc/d``, since ``**`` is at the start of the wildcard expression.

    Args:
        patterns: one pattern for each line, without comments; a leading ``!`` means: do not leave out.

    Attributes:
        met: the bit with the number of a pattern is set if the pattern has matched something.

    Raises:
        UsageError: there are too many patterns, or a pattern is too long.

    The library pathspec is not used: it makes a regular expression of each pattern. With it, ``*a*a*a*a*b``
    takes 6 s for a name of 250 bytes, ``?`` matches a character instead of a byte, ``foo**/bar`` does not
    match ``foo/x/bar``, and ``a/**\\/b`` is refused.

    Source: ``gitignore(5)``, and the results of git 2.39 (``misc/gitignore_world.py``).
    """

    def __init__(self, patterns: Sequence[bytes]) -> None:
        if len(patterns) > MAX_PATTERNS or sum(map(len, patterns)) > MAX_PATTERN_BYTES:
            raise UsageError(
                f"there are more than {MAX_PATTERNS} patterns, or {MAX_PATTERN_BYTES} bytes of them; give "
                "fewer"
            )
        self.met = 0
        self._negated: list[bool] = []
        self._ends: list[int] = []
        self._numbers: list[int] = []
        self._symbols: dict[int, list[int]] = {}
        self._sets: list[tuple[int, int]] = []
        stars: list[int] = []
        rests: list[int] = []
        levels: list[int] = []
        starts: tuple[list[int], list[int]] = ([], [])
        ends: tuple[list[int], list[int]] = ([], [])
        bit = 0
        for number, pattern in enumerate(patterns):
            if len(pattern) > MAX_PATTERN:
                shown = printable(pattern[:50].decode("utf-8", "replace"))
                raise UsageError(f"the pattern '{shown}' has more than {MAX_PATTERN} bytes")
            parsed = _Pattern(pattern)
            self._negated.append(parsed.is_negated)
            if parsed.tokens is None:
                continue
            starts[parsed.is_of_path].append(bit)
            for token in parsed.tokens:
                if token == _STAR:
                    stars.append(bit)
                elif token == _REST:
                    rests.append(bit)
                elif token == _LEVELS:
                    levels.append(bit)
                    bit += 1
                    self._symbols.setdefault(_SLASH, []).append(bit)
                elif token & (token - 1):
                    self._sets.append((bit, token))
                else:
                    self._symbols.setdefault(token.bit_length() - 1, []).append(bit)
                bit += 1
            ends[parsed.is_of_directory].append(bit)
            self._ends.append(bit)
            self._numbers.append(number)
            bit += 1
        self._levels = _bits(levels)
        self._skips = _bits(stars + rests)
        self._loops = _bits(rests + [each + 1 for each in levels])
        self._loops_no_slash = self._loops | _bits(stars)
        self._of_any = _bits(ends[False])
        self._of_directories = self._of_any | _bits(ends[True])
        self._name_start = self._closed(_bits(starts[False]))
        self._path_start = self._closed(_bits(starts[True]))
        self._moves: dict[int, int] = {}
        self._inside: dict[bytes, int] = {b"": self._path_start}
        self._latest = b"", 0

    def deciding(self, path: bytes, is_directory: bool) -> int | None:
        """
        Return the number of the pattern that decides about an entry; None: no pattern matches.

        Args:
            path: relative to the directory of the patterns, with ``/``. The caller has checked that no
                directory above the entry is left out.
        """
        return self._decide(self._matching(path), is_directory)

    def leaves_out(self, path: bytes, is_directory: bool | None) -> bool:
        """
        Return whether an entry is left out, and record in ``met`` which patterns match.

        Args:
            is_directory: None if unknown; then return True only if the entry is left out both as a directory
                and as anything else.
        """
        if not self._ends:
            return False
        found = self._matching(path)
        if not found:
            return False
        if is_directory is None:
            if not (self._leaves_out(found, False) and self._leaves_out(found, True)):
                return False
            is_directory = True
        self._note(found if is_directory else found & self._of_any)
        return self._leaves_out(found, is_directory)

    def has_met(self, number: int) -> bool:
        """Return whether the pattern with this number has matched something."""
        return bool(self.met >> number & 1)

    def _leaves_out(self, found: int, is_directory: bool) -> bool:
        number = self._decide(found, is_directory)
        return number is not None and not self._negated[number]

    def _decide(self, found: int, is_directory: bool) -> int | None:
        if not is_directory:
            found &= self._of_any
        return self._numbers[self._number_at(found)] if found else None

    def _number_at(self, found: int) -> int:
        return bisect_left(self._ends, found.bit_length() - 1)

    def _note(self, found: int) -> None:
        while found:
            at = self._number_at(found)
            self.met |= 1 << self._numbers[at]
            found ^= 1 << self._ends[at]

    def _matching(self, path: bytes) -> int:
        """Return the accepting bits of all patterns that match a path."""
        if path == self._latest[0]:
            return self._latest[1]  # a walk asks twice: before and after it knows the kind
        directory, _, name = path.rpartition(b"/")
        state = self._inside.get(directory)
        if state is None:
            if len(self._inside) >= _MAX_STATES:
                self._inside = {b"": self._path_start}
            state = self._inside[directory] = self._run(self._path_start, directory + b"/")
        found = self._run(state | self._name_start, name) & self._of_directories
        self._latest = path, found
        return found

    def _run(self, state: int, data: bytes) -> int:
        moves, skips, levels = self._moves, self._skips, self._levels
        for byte in data:
            if not state:
                break
            move = moves.get(byte)
            if move is None:
                move = self._move(byte)
            loops = self._loops if byte == _SLASH else self._loops_no_slash
            state = (state & move) << 1 | state & loops
            if state & levels:
                entered = state & levels
                state |= entered << 1 | entered << 2
            state |= (state & skips) << 1
        return state

    def _closed(self, state: int) -> int:
        entered = state & self._levels
        state |= entered << 1 | entered << 2
        return state | (state & self._skips) << 1

    def _move(self, byte: int) -> int:
        """Return the bits of all positions from which this byte leads to the next position."""
        places = self._symbols.get(byte, [])
        move = _bits(places + [bit for bit, members in self._sets if members >> byte & 1])
        self._moves[byte] = move
        return move


class _Pattern:
    """
    One parsed pattern.

    Attributes:
        tokens: the tokens of the pattern; None: the pattern matches nothing.
        is_of_path: whether the pattern is compared with the whole path, instead of the name.
    """

    def __init__(self, pattern: bytes) -> None:
        self.is_negated = pattern.startswith(b"!")
        text = pattern[self.is_negated :]
        self.is_of_directory = text.endswith(b"/")
        text = text[: len(text) - self.is_of_directory]
        self.is_of_path = b"/" in text
        prefix = 0
        if self.is_of_path:
            text = text.removeprefix(b"/")
            while prefix < len(text) and text[prefix] not in _SPECIAL:
                prefix += 1
        self.tokens: list[int] | None = None
        rest = _tokens(text[prefix:], self.is_of_path)
        if text and rest is not None:
            self.tokens = [1 << byte for byte in text[:prefix]] + rest


def _tokens(text: bytes, of_path: bool) -> list[int] | None:
    """Return the tokens of a wildcard expression; None: the expression is malformed, and matches nothing."""
    tokens: list[int] = []
    at = 0
    while at < len(text):
        byte = text[at]
        at += 1
        if byte == 0x2A:  # *
            end = at
            while text[end : end + 1] == b"*":
                end += 1
            is_long = of_path and end > at and (at == 1 or text[at - 2] == _SLASH)
            at = end
            after = text[at : at + 2]
            if is_long and after.startswith(b"/"):
                if tokens[-1:] != [_LEVELS]:
                    tokens.append(_LEVELS)
                at += 1
            else:
                tokens.append(_REST if is_long and after in (b"", b"\\/") else _STAR)
        elif byte == 0x3F:  # ?
            tokens.append(_NO_SLASH)
        elif byte == 0x5B:  # [
            some, at = _set(text, at)
            if at < 0:
                return None
            tokens.append(some & _NO_SLASH)
        elif byte == 0x5C:  # a backslash
            if at == len(text):
                return None
            tokens.append(1 << text[at])
            at += 1
        else:
            tokens.append(1 << byte)
    return tokens


def _set(text: bytes, at: int) -> tuple[int, int]:
    """
    Parse a bracket expression ``[...]``. Return the set of bytes that it matches, and the index after it, or
    -1 if it is malformed.
    """
    is_inverted = text[at : at + 1] in (b"!", b"^")
    at += is_inverted
    members = before = 0
    first = at
    while at < len(text) and (text[at] != 0x5D or at == first):
        byte = text[at]
        if byte == 0x5C:
            at += 1
            if at == len(text):
                return 0, -1
            byte = text[at]
            members |= 1 << byte
        elif byte == 0x2D and before and text[at + 1 : at + 2] not in (b"", b"]"):
            at += 1
            if text[at] == 0x5C:
                at += 1
                if at == len(text):
                    return 0, -1
            members |= _span(before, text[at])
            byte = 0
        elif text[at : at + 2] == b"[:":
            end = text.find(b"]", at + 2)
            if end < 0:
                return 0, -1
            if end > at + 2 and text[end - 1] == 0x3A:
                named = _CLASSES.get(text[at + 2 : end - 1])
                if named is None:
                    return 0, -1
                members |= named
                at, byte = end, 0
            else:
                members |= 1 << byte
        else:
            members |= 1 << byte
        before = byte
        at += 1
    if at >= len(text):
        return 0, -1
    return (_ALL & ~members if is_inverted else members), at + 1


def _span(first: int, last: int) -> int:
    return (1 << last + 1) - (1 << first) if first <= last else 0


def _bits(places: Sequence[int]) -> int:
    """Return the integer in which exactly the bits at these places are set."""
    if not places:
        return 0
    data = bytearray(max(places) // 8 + 1)
    for place in places:
        data[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(data, "little")


_DIGIT = _span(0x30, 0x39)
_LOWER, _UPPER = _span(0x61, 0x7A), _span(0x41, 0x5A)
_ALPHA = _LOWER | _UPPER
_GRAPH = _span(0x21, 0x7E)
_CLASSES = {
    b"alnum": _ALPHA | _DIGIT,
    b"alpha": _ALPHA,
    b"blank": 1 << 0x20 | 1 << 0x09,
    b"cntrl": _span(0, 0x1F) | 1 << 0x7F,
    b"digit": _DIGIT,
    b"graph": _GRAPH,
    b"lower": _LOWER,
    b"print": _GRAPH | 1 << 0x20,
    b"punct": _GRAPH & ~(_ALPHA | _DIGIT),
    b"space": _span(0x09, 0x0D) | 1 << 0x20,
    b"upper": _UPPER,
    b"xdigit": _DIGIT | _span(0x41, 0x46) | _span(0x61, 0x66),
}
"""These are the classes of the C locale, even for users of other locales, since git has its own tables."""


def patterns_of(data: bytes) -> list[tuple[int, bytes]]:
    """
    Return the patterns of a file in the format of ``.gitignore``, each with its line number.

    Empty lines and lines that begin with ``#`` are ignored. Spaces at the end of a line (except after a
    backslash) and carriage returns are removed.
    """
    found = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.startswith(b"#"):
            continue
        pattern = _trimmed(line.removesuffix(b"\r"))
        if pattern:
            found.append((number, pattern))
    return found


def _trimmed(line: bytes) -> bytes:
    bare = line.rstrip(b" ")
    escapes = len(bare) - len(bare.rstrip(b"\\"))
    return line[: len(bare) + (escapes % 2 and len(bare) < len(line))]
