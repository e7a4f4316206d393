"""
A form with files (``multipart/form-data``), parsed as it arrives, so that each file is written to disk only
once.

The first file has its own ``BodySpool``; all other files share another one. So the form needs at most two
open files, however many files it contains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
from multipart import MultipartError, MultipartSegment, PushMultipartParser

from pipegrid.gateway.body_spool import IN_MEMORY_BYTES, BodyRefused, BodySpool, SpoolSpace
from pipegrid.transfer.put.source import FileRange, SourceLike

MAX_FIELDS = 100
MAX_FILES = 10_000
"""Maximum number of files in a form; the bytes of their names count as bytes of fields."""

FILE_FIELD = "file"
_CHARSET = re.compile(r"[A-Za-z0-9._-]{1,40}\Z")


@attrs.define(eq=False)
class FormFile:
    """
    A file of a form.

    Attributes:
        name: file name that the client gave; empty if it gave none.
        body: contains the bytes of this file; all files of the form except the first share one body.
        start, size: position and length of the file in ``body``, in bytes.
    """

    name: str
    body: BodySpool
    start: int = 0
    size: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether this is a file field for which no file was chosen."""
        return not (self.name or self.size)

    @contextmanager
    def opened(self) -> Iterator[SourceLike]:
        """
        Yield the content of the file as a source for ``Grid.put``, usable until the ``with`` block ends.
        """
        if self.size <= IN_MEMORY_BYTES:
            self.body.check()
            yield self.body.read_at(self.start, self.size)
            return
        with self.body.opened() as whole:
            assert not isinstance(whole, bytes), "a large file is not in memory"
            yield FileRange(whole, self.start, self.size)


class FormBody(BodySpool):
    """
    The body of a request that is a form.

    Args:
        boundary: the text that separates the fields.
        fields_bytes: maximum size of all fields and file names together.
        expected_bytes: see ``BodySpool``.

    Attributes:
        files: the files of the form, in its order.
    """

    def __init__(
        self,
        space: SpoolSpace,
        boundary: str,
        fields_bytes: int,
        expected_bytes: int | None = None,
    ) -> None:
        self.files: list[FormFile] = []
        self._others: BodySpool | None = None
        super().__init__(space, expected_bytes)
        self._fields_bytes = fields_bytes
        self._held_bytes = 0
        self._fields: dict[str, bytes] = {}
        self._count = 0
        self._segment: MultipartSegment | None = None
        self._field_pieces: list[bytes] = []
        try:
            self._parser = PushMultipartParser(boundary, max_segment_count=MAX_FIELDS + MAX_FILES)
        except (MultipartError, ValueError) as error:
            self.refuse(_malformed(error))

    def write(self, data: bytes) -> None:
        """Parse the next bytes of the form."""
        if self.refused is not None:
            return
        self.size += len(data)
        try:
            for event in self._parser.parse(bytes(data)):
                self._take(event)
        except (MultipartError, ValueError) as error:
            self.refuse(_malformed(error))
        except BodyRefused as error:
            self.refuse(error)

    def fields(self) -> dict[str, str]:
        """
        Return the fields of the form, except its files; call this after the form has arrived.

        Raises:
            BodyRefused: the form was dropped, or is malformed.
        """
        if self.refused is None:
            try:
                self._parser.close()
            except MultipartError as error:
                self.refuse(_malformed(error))
        self.check()
        charset = self._fields.get("_charset", b"utf-8").decode("ascii", "replace").strip()
        if not _CHARSET.match(charset):
            raise BodyRefused("the form names a character set that does not exist", 400)
        try:
            return {name: data.decode(charset) for name, data in self._fields.items()}
        except (LookupError, UnicodeDecodeError):
            raise BodyRefused(f"a field of the form is not valid {charset}", 400) from None

    def chosen_files(self) -> list[FormFile]:
        """
        Return the files of the form; a last file field without a chosen file is left out, unless it is the
        only one.
        """
        return self.files[:-1] if len(self.files) > 1 and self.files[-1].is_empty else self.files

    def close(self) -> None:
        """Free the memory or disk space of the files; a second call does nothing."""
        super().close()
        self._close_files()

    def refuse(self, error: BodyRefused) -> None:
        """Drop the bytes of the form that have arrived, and all that follow."""
        super().refuse(error)
        self._close_files()

    def _close_files(self) -> None:
        for body in {file.body for file in self.files}:
            body.close()

    def _take(self, event: object) -> None:
        if isinstance(event, MultipartSegment):
            self._segment, self._field_pieces = event, []
            if event.name == FILE_FIELD:
                self._begin_file(event.filename or "")
                return
            self._count += 1
            if self._count > MAX_FIELDS:
                raise BodyRefused(f"the form has more than {MAX_FIELDS} fields", 400)
            return
        segment = self._segment
        assert segment is not None, "the parser begins with a segment"
        is_file = segment.name == FILE_FIELD
        if event is None:
            if not is_file:
                self._fields.setdefault(segment.name or "", b"".join(self._field_pieces))
        elif is_file:
            data = bytes(event)  # type: ignore[call-overload]
            file = self.files[-1]
            file.size += len(data)
            file.body.write(data)
            file.body.check()
        else:
            data = bytes(event)  # type: ignore[call-overload]
            self._hold(len(data))
            self._field_pieces.append(data)

    def _begin_file(self, name: str) -> None:
        if self.files and self.files[-1].is_empty:
            empty = self.files.pop()
            if empty.body is not self._others:
                empty.body.close()
        if len(self.files) == MAX_FILES:
            raise BodyRefused(f"the form has more than {MAX_FILES} files; send them in parts", 413)
        self._hold(len(name.encode("utf-8", "surrogatepass")))
        if not self.files:
            self.files.append(FormFile(name, BodySpool(self._space)))
            return
        if self._others is None:
            self._others = BodySpool(self._space)
        self.files.append(FormFile(name, self._others, self._others.size))

    def _hold(self, count: int) -> None:
        """
        Count bytes that are held in memory.

        Raises:
            BodyRefused: more bytes are held than ``fields_bytes``.
        """
        self._held_bytes += count
        if self._held_bytes > self._fields_bytes:
            raise BodyRefused(f"the form's fields have more than {self._fields_bytes} bytes", 413)


def _malformed(error: Exception) -> BodyRefused:
    return BodyRefused(f"the form cannot be understood: {error}", 400)
