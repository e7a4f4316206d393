"""Patches of Debian indexes (pdiffs): parsed, merged and applied."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from hashlib import sha256
from io import BytesIO
from queue import SimpleQueue
from threading import BoundedSemaphore, Thread
from typing import Any, NamedTuple

from pipegrid.mirror.archive_file import quoted
from pipegrid.mirror.decompression import CHUNK_BYTES, PatchError, Unpacking, unpacked
from pipegrid.reactor.process_settings import start_thread

# Patches of indexes: ed scripts, parsed, checked and merged, without a file or a clock.
#
# Archives publish the changes of an index as ``diff --ed`` writes them: commands from the last line to the
# first,
#
#     LINE[,LINE]d            delete these lines
#     LINE[,LINE]c, text, .   replace these lines with the text
#     LINEa, text, .          insert the text after this line
#     s/.//, a                after a text that ends in "..": the line is ".", and the text continues
#
# A patch applies to the result of the previous one. ``merge`` combines patches without the index: the result
# is one list of pieces, each a range of lines of the original index or lines of a patch, in the order of the
# output. So the index is read once for any number of patches, and the hash of the result proves the index,
# the patches and their order.
#
# Sources: POSIX ed; the ``Index`` files of Debian's archive.

END = 1 << 62
"""Stands for the end of the index: its number of lines is unknown before the index is read."""

MAX_EDITS = 1_000_000
"""The maximum number of edits in all patches of an index; each takes 150 bytes of memory."""

MAX_STEPS = 20_000_000
"""Maximum pieces and edits in all steps of a merge; these take ten seconds, like fetching the index."""

_COMMAND = re.compile(rb"([0-9]{1,13})(?:,([0-9]{1,13}))?([acd])")


class LineEdit(NamedTuple):
    """
    One change: the lines from ``first`` up to ``last``, exclusive, counted from 0, are replaced by ``text``.

    Attributes:
        text: whole lines, each with its line end.
    """

    first: int
    last: int
    text: list[bytes]


Piece = tuple[int, int] | list[bytes]
"""A range of lines of the original index (first and end, exclusive, counted from 0), or lines of patches."""


_NONE: list[bytes] = []


def parse(patch: bytes, name: str, most: int = MAX_EDITS) -> list[LineEdit]:
    """
    Parse an ed script.

    Args:
        name: of the patch, for errors.
        most: the maximum number of edits.

    Returns:
        The edits, from the first line to the last, none overlapping.

    Raises:
        PatchError: the script is invalid or incomplete, or has too many commands, or they are not in
            descending order.
    """
    edits: list[LineEdit] = []
    lines = BytesIO(patch).readlines()  # splitlines would also split at a carriage return
    if lines and not lines[-1].endswith(b"\n"):
        raise PatchError(f"the patch {name} is incomplete: its last line has no end")
    at, count = 0, len(lines)
    before = END
    while at < count:
        number = at + 1
        command = lines[at].rstrip(b"\n")
        at += 1
        match = _COMMAND.fullmatch(command)
        if match is None:
            raise PatchError(
                f"the patch {name} has no command in line {number}: {quoted(command.decode('latin-1'), 40)}"
            )
        kind = match[3]
        first = int(match[1])
        last = int(match[2] or first)
        if kind == b"a":
            if match[2]:
                raise PatchError(f"the patch {name} appends to a range in line {number}")
            begin = end = first
        else:
            begin, end = first - 1, last
        if begin < 0 or end < begin or (kind != b"a" and last < first) or end > before:
            raise PatchError(f"the commands of the patch {name} are not in order, in line {number}")
        if len(edits) == most:
            raise PatchError(f"the patch {name} has too many commands; fetch the index again")
        text = _NONE
        if kind != b"d":
            at = _read_text(lines, at, text := [], name)
        edits.append(LineEdit(begin, end, text))
        before = begin
    edits.reverse()
    return edits


def _read_text(lines: Sequence[bytes], at: int, text: list[bytes], name: str) -> int:
    """Append lines to ``text`` up to a line with only a dot; return the position of the next command."""
    count = len(lines)
    while True:
        while at < count and lines[at] != b".\n":
            text.append(lines[at])
            at += 1
        if at >= count:
            raise PatchError(f"the patch {name} is incomplete: a text in it has no end")
        at += 1
        # A line with only a dot is written as two dots; a command removes one of them, and the text
        # continues.
        if not (at < count and lines[at] == b"s/.//\n"):
            return at
        if not text or text[-1][:1] != b".":
            raise PatchError(f"the patch {name} removes lines that do not exist, in line {at + 1}")
        text[-1] = text[-1][1:]
        at += 1
        if not (at < count and lines[at] == b"a\n"):
            return at
        at += 1


def merge(patches: Sequence[Sequence[LineEdit]]) -> list[Piece]:
    """
    Return the pieces of the index to which all patches have been applied in order.

    Args:
        patches: the edits of each patch, as ``parse`` returns them; the first patch is for the original
            index.

    Returns:
        The pieces in the order of the output; the last one ends at ``END`` unless a patch has replaced the
            end of the index.

    Raises:
        PatchError: merging would take more than ``MAX_STEPS``.
    """
    pieces: list[Piece] = [(0, END)]
    steps = 0
    for edits in patches:
        steps += len(pieces) + len(edits)
        if steps > MAX_STEPS:
            raise PatchError(
                "the patches change too much, one after the other; fetch the index again"
            )
        pieces = _apply(pieces, edits)
    return pieces


def _apply(pieces: list[Piece], edits: Sequence[LineEdit]) -> list[Piece]:
    out: list[Piece] = []
    rest = _PdiffLines(pieces)
    at = 0
    for edit in edits:
        rest.take(edit.first - at, out)
        rest.skip(edit.last - edit.first)
        if edit.text:
            _add(out, edit.text)
        at = edit.last
    rest.take(2 * END, out)  # more than END, which does not count lines of patches
    return out


class _PdiffLines:
    """The lines of pieces, from which lines are taken in order."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = iter(pieces)
        self._piece: Piece | None = next(self._pieces, None)
        # How many lines of ``_piece`` were taken, if it is a list; counting avoids a copy of the others.
        self._taken = 0

    def take(self, count: int, out: list[Piece]) -> None:
        """Move the next ``count`` lines to ``out``, or all that are left if they are fewer."""
        for piece in self._next(count):
            _add(out, piece)

    def skip(self, count: int) -> None:
        """Skip the next ``count`` lines."""
        for _ in self._next(count):
            pass

    def _next(self, count: int) -> Iterator[Piece]:
        while count > 0 and self._piece is not None:
            piece, taken = self._piece, self._taken
            size = len(piece) - taken if isinstance(piece, list) else piece[1] - piece[0]
            if size <= count:
                yield piece[taken:] if isinstance(piece, list) else piece
                self._piece, self._taken = next(self._pieces, None), 0
                count -= size
            elif isinstance(piece, list):
                self._taken += count
                yield piece[taken : self._taken]
                return
            else:
                middle = piece[0] + count
                yield (piece[0], middle)
                self._piece = (middle, piece[1])
                return


def _add(out: list[Piece], piece: Piece) -> None:
    last = out[-1] if out else None
    if isinstance(piece, list):
        if isinstance(last, list):
            last.extend(piece)
        else:
            out.append(list(piece))
    elif isinstance(last, tuple) and last[1] == piece[0]:
        out[-1] = (last[0], piece[1])
    elif piece[1] > piece[0]:
        out.append(piece)


# Writing the new index from its pieces while reading the old one once: read, count lines, hash, write.
#
# The reader counts the line ends of each page in blocks, so that the beginning of a piece is searched only in
# some kilobytes; a second thread hashes and writes. ``PAGES`` pages circulate between the two threads,
# whatever the size of the index, since touching new memory would cost as much as reading and writing.
#
# **Speed.** For 430 MB in lines of 70 bytes, counting with ``bytearray.count`` takes 0.2 s. numpy takes half
# of that, and lets the other thread run; but importing numpy takes a tenth of a second, so it is not used for
# small indexes.

BLOCK_BYTES = 16 << 10
PAGES = 6
"""How many pages of ``CHUNK_BYTES`` are used."""

WORTH_NUMPY_BYTES = 64 << 20
"""The size of an index, packed or not, from which on numpy is used."""

MOST_PIECES = 500
"""The maximum number of pieces in one write; systems support at least 1024."""

MAX_PATCH_BYTES = 128 << 20
"""The maximum size of one decompressed patch. Patches of the largest indexes have a few megabytes."""

MAX_PATCHES = 1000
MAX_ALL_PATCHES_BYTES = 256 << 20
"""The maximum size of all decompressed patches of an index together, which are merged in memory."""

MAX_PATCH_LINES = 4_000_000
"""
The maximum number of lines in all patches of an index: each line takes 50 bytes more than its length. The
patches of two weeks of sid have a million lines.
"""


class Patched(NamedTuple):
    """
    The size and hash of a patched index.

    Attributes:
        size_bytes: of the patched index.
        digest: SHA-256 of the patched index.
    """

    size_bytes: int
    digest: bytes


def apply_patches(
    index: str, patches: Sequence[str], fd: int, most_bytes: int | None = None
) -> Patched:
    """
    Write an index with patches applied in order.

    Args:
        index: path of the index; a packed one is decompressed while it is read.
        patches: paths of the patches, oldest first, packed or not. Without patches the index is only
            decompressed.
        fd: a descriptor to which the result is written, from its current position on.
        most_bytes: maximum size of the result; None: no limit.

    Raises:
        PatchError: a patch is damaged, too large, or not for this index.
        OSError: a file cannot be read or written.
    """
    if len(patches) > MAX_PATCHES:
        raise PatchError(f"{len(patches)} patches are too many; fetch the index again")
    return write_pieces(index, merge(_parsed(patches)), fd, most_bytes)


def _parsed(patches: Sequence[str]) -> list[list[LineEdit]]:
    """Return the edits of each patch. Raises PatchError if all patches together exceed a limit."""
    parsed: list[list[LineEdit]] = []
    size = lines = edits = 0
    for path in patches:
        patch = read_patch(path)
        size += len(patch)
        if size > MAX_ALL_PATCHES_BYTES:
            raise PatchError(
                f"the patches have more than {MAX_ALL_PATCHES_BYTES} bytes together; fetch the index again"
            )
        lines += patch.count(b"\n")
        if lines > MAX_PATCH_LINES:
            raise PatchError(
                f"the patches have more than {MAX_PATCH_LINES} lines together; fetch the index again"
            )
        parsed.append(parse(patch, path, MAX_EDITS - edits))
        edits += len(parsed[-1])
    return parsed


def read_patch(path: str) -> bytes:
    """
    Return the decompressed content of a patch.

    Raises:
        PatchError: the patch is damaged, or larger than ``MAX_PATCH_BYTES``.
    """
    parts = []
    size = 0
    for part in unpacked(path):
        size += len(part)
        if size > MAX_PATCH_BYTES:
            raise PatchError(f"the patch {path} is larger than {MAX_PATCH_BYTES} bytes")
        parts.append(bytes(part))
    return b"".join(parts)


def write_pieces(
    index: str, pieces: Sequence[Piece], fd: int, most_bytes: int | None = None
) -> Patched:
    """
    Write the pieces of a new index, reading the old index once.

    Raises:
        PatchError: the index has fewer lines than the pieces need, is damaged, or becomes too large.
        OSError: the index cannot be read, or the result cannot be written.
    """
    # The writer is made last, so that its thread is always stopped: otherwise it would keep the process from
    # ending.
    with closing(Unpacking(index)) as unpacking, closing(_Writer(fd, most_bytes, index)) as writer:
        source = _Lines(unpacking, os.path.getsize(index), writer)
        line = 0
        for piece in pieces:
            if isinstance(piece, list):
                writer.write(b"".join(piece))
                continue
            first, last = piece
            for end, kept in ((first, False), (last, True)):
                missing = source.advance(end - line, kept)
                if missing and end != END:
                    raise PatchError(
                        f"a patch is not for {quoted(index)}: it speaks of line {end},"
                        f" and there are {end - missing}"
                    )
                line = end
        return writer.finish()


class _Page:
    """A page of the index, and where its lines end."""

    def __init__(self, data: bytearray, size_bytes: int, ends: _Ends) -> None:
        self.data = data
        self.size_bytes = size_bytes
        self.at = 0
        self._ends = ends
        self._view = memoryview(data)
        self._counts: list[int] | None = None
        self._block = 0
        self._passed = 0  # how many line ends of the block were consumed
        self._left = 0

    def take(self, lines: int) -> tuple[memoryview, int]:
        """
        Return the bytes of the next ``lines`` lines, or of all lines that are left; and the number of line
        ends in these bytes (0 if they were not counted, since the whole index is wanted).
        """
        start = self.at
        if lines >= END >> 1:  # the whole page is wanted, so counting is not needed
            self.at = self.size_bytes
            return self._view[start : self.at], 0
        if self._counts is None:
            self._counts = self._ends.count(self.data, self.size_bytes)
            self._left = sum(self._counts)
        if lines > self._left:
            self.at = self.size_bytes
            ends, self._left = self._left, 0
            return self._view[start : self.at], ends
        self._left -= lines
        wanted = lines + self._passed
        while wanted > self._counts[self._block]:
            wanted -= self._counts[self._block]
            self._block += 1
        self._passed = wanted
        self.at = self._ends.after(self.data, self._block * BLOCK_BYTES, wanted)
        return self._view[start : self.at], lines


class _Ends:
    """Finds the line ends of the page that was counted last."""

    def count(self, data: bytearray, size_bytes: int) -> list[int]:
        """Return the number of line ends in each block of a page."""
        return [
            data.count(b"\n", start, min(start + BLOCK_BYTES, size_bytes))
            for start in range(0, size_bytes, BLOCK_BYTES)
        ]

    def after(self, data: bytearray, start: int, number: int) -> int:
        """Return the position after the line end with this number, in the block that begins at ``start``."""
        at = start
        for _ in range(number):
            at = data.index(b"\n", at) + 1
        return at


class _NumpyEnds(_Ends):
    """Does the same as ``_Ends`` with numpy: faster, and another thread can run at the same time."""

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy
        self._is_end = numpy.empty(CHUNK_BYTES, dtype=bool)

    def count(self, data: bytearray, size_bytes: int) -> list[int]:
        numpy, is_end = self._numpy, self._is_end
        numpy.equal(numpy.frombuffer(data, numpy.uint8), 10, out=is_end)
        is_end[size_bytes:] = False  # after a shorter page, clear the rest of the previous one
        return [
            int(numpy.count_nonzero(is_end[start : start + BLOCK_BYTES]))
            for start in range(0, size_bytes, BLOCK_BYTES)
        ]

    def after(self, data: bytearray, start: int, number: int) -> int:
        block = self._is_end[start : start + BLOCK_BYTES]
        return start + int(self._numpy.flatnonzero(block)[number - 1]) + 1


class _Lines:
    """The lines of an index, which is read once; the lines to keep go to a writer."""

    def __init__(self, source: Unpacking, size_bytes: int, writer: _Writer) -> None:
        self._writer = writer
        self._source = source
        numpy = _numpy() if size_bytes >= WORTH_NUMPY_BYTES else None
        self._ends = _Ends() if numpy is None else _NumpyEnds(numpy)
        self._page = _Page(bytearray(), 0, self._ends)
        self._unended = False

    def advance(self, lines: int, kept: bool) -> int:
        """Advance by ``lines`` lines, and keep or drop these; return how many of them the index lacks."""
        while lines > 0:
            page = self._page
            if page.at == page.size_bytes:
                if not self._turn():
                    # A last line without a line end counts as a line.
                    missing = lines - (1 if self._unended else 0)
                    self._unended = False
                    return missing
                page = self._page
            view, ends = page.take(lines)
            if view:
                self._unended = view[-1] != 10
                if kept:
                    self._writer.write(view)
            lines -= ends
        return 0

    def _turn(self) -> bool:
        """
        Give the page to the writer, which returns it later, and read another page; return False at the end.
        """
        data = self._writer.other_page(self._page.data)
        self._page = _Page(data, self._source.read_into(data), self._ends)
        return self._page.size_bytes > 0


class _Writer:
    """
    Hashes and writes bytes in order, in its own thread if one can be started; the input is in ``PAGES``
    pages.
    """

    def __init__(self, fd: int, most_bytes: int | None, index: str) -> None:
        self._fd = fd
        self._most_bytes = most_bytes
        self._index = index
        self._hash = sha256()
        self._size = 0
        # Each entry has what to write, and the page that is free after that.
        self._queue: SimpleQueue[tuple[list[bytes | memoryview], bytearray | None] | None]
        self._queue = SimpleQueue()
        # Limits the queued texts of patches, which take memory but no page.
        self._free_texts = BoundedSemaphore(PAGES)
        self._free: SimpleQueue[bytearray] = SimpleQueue()
        self._pages = 0
        self._gathered: list[bytes | memoryview] = []
        self._gathered_bytes = 0
        self._error: BaseException | None = None
        thread = Thread(target=self._work, name="pipegrid-patch")
        self._thread = thread if start_thread(thread) else None
        self._has_none = self._thread is None

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes; the caller must not change them until it gets their page again."""
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= CHUNK_BYTES or len(self._gathered) >= MOST_PIECES:
            self._hand_over(None)

    def other_page(self, used: bytearray) -> bytearray:
        """Release a page after its last write, and return a page to read into."""
        self._hand_over(used if used else None)
        if self._pages < PAGES:
            self._pages += 1
            return bytearray(CHUNK_BYTES)
        return self._free.get()

    def finish(self) -> Patched:
        """Wait until all bytes are written; return their size and hash."""
        self._hand_over(None)
        self.close()
        if self._error is not None:
            raise self._error
        return Patched(self._size, self._hash.digest())

    def close(self) -> None:
        """End the thread after its queued work; a second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _hand_over(self, page: bytearray | None) -> None:
        if self._error is not None:
            raise self._error
        self._size += self._gathered_bytes
        if self._most_bytes is not None and self._size > self._most_bytes:
            raise PatchError(
                f"the patched {quoted(self._index)} has more than {self._most_bytes} bytes"
            )
        if self._gathered or page is not None:
            self._free_texts.acquire()
            pieces, self._gathered, self._gathered_bytes = self._gathered, [], 0
            if self._has_none:
                self._do(pieces, page)
            else:
                self._queue.put((pieces, page))

    def _work(self) -> None:
        """Hash and write what is queued, until the queue gives None. Runs in the writer's thread."""
        while (work := self._queue.get()) is not None:
            self._do(*work)

    def _do(self, pieces: list[bytes | memoryview], page: bytearray | None) -> None:
        if self._error is None and pieces:
            try:
                for piece in pieces:
                    self._hash.update(piece)
                self._write_all(pieces)
            except BaseException as error:  # ``_hand_over`` and ``finish`` raise it
                self._error = error
        pieces.clear()
        self._free_texts.release()
        if page is not None:
            self._free.put(page)

    def _write_all(self, pieces: Sequence[bytes | memoryview]) -> None:
        written = os.writev(self._fd, pieces)
        if written < sum(map(len, pieces)):
            view = memoryview(b"".join(pieces))[written:]
            while view:
                view = view[os.write(self._fd, view) :]


@lru_cache(maxsize=1)
def _numpy() -> Any:
    # numpy's linear algebra would start a thread for each processor, which takes as long as all other work.
    variable = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(variable)
    os.environ.setdefault(variable, "1")
    try:
        import numpy
    except ImportError:
        return None
    finally:
        if before is None:
            del os.environ[variable]
    return numpy
