"""
A form with a file (``multipart/form-data``), parsed as it arrives, so that the file is written only once.
"""

from __future__ import annotations

import re

import attrs
from multipart import MultipartError, MultipartSegment, PushMultipartParser

from pipegrid.gateway.body_spool import BodyRefused, BodySpool, SpoolSpace

MAX_FIELDS = 100
FILE_FIELD = "file"
_CHARSET = re.compile(r"[A-Za-z0-9._-]{1,40}\Z")


@attrs.frozen
class FormFile:
    """
    The file of a form.

    Attributes:
        name: as the client gave it; empty if there is none.
        body: its bytes.
    """

    name: str
    body: BodySpool


class FormBody(BodySpool):
    """
    The body of a request that is a form.

    Args:
        boundary: the separator of its fields.
        fields_bytes: the most of all fields, except the file.
        expected_bytes: see ``BodySpool``.

    Attributes:
        file: its field ``file``; None: it has none (yet).
    """

    def __init__(
        self,
        space: SpoolSpace,
        boundary: str,
        fields_bytes: int,
        expected_bytes: int | None = None,
    ) -> None:
        self.file: FormFile | None = None
        super().__init__(space, expected_bytes)
        self._fields_bytes = fields_bytes
        self._held_bytes = 0
        self._fields: dict[str, bytes] = {}
        self._segment: MultipartSegment | None = None
        self._field_pieces: list[bytes] = []
        self._parser: PushMultipartParser | None = None
        try:
            self._parser = PushMultipartParser(boundary, max_segment_count=MAX_FIELDS)
        except (MultipartError, ValueError) as error:
            self.refuse(_malformed(error))

    def write(self, data: bytes) -> None:
        """Parse the next bytes of the form."""
        if self.refused is not None or self._parser is None:
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
        Return its fields, except the file; call this when the form has arrived.

        Raises:
            BodyRefused: it is malformed, or too large.
        """
        if self.refused is None and self._parser is not None:
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

    def close(self) -> None:
        """Free the space; a second call does nothing."""
        super().close()
        if self.file is not None:
            self.file.body.close()

    def refuse(self, error: BodyRefused) -> None:
        """Drop the bytes that have arrived, and all later ones."""
        super().refuse(error)
        if self.file is not None:
            self.file.body.close()

    def _take(self, event: object) -> None:
        if isinstance(event, MultipartSegment):
            self._segment, self._field_pieces = event, []
            if event.name == FILE_FIELD and self.file is None:
                self.file = FormFile(event.filename or "", BodySpool(self._space))
            return
        segment = self._segment
        assert segment is not None, "the parser begins with a segment"
        is_file = segment.name == FILE_FIELD
        if event is None:
            if not is_file:
                self._fields.setdefault(segment.name or "", b"".join(self._field_pieces))
        elif is_file and self.file is not None:
            self.file.body.write(bytes(event))  # type: ignore[call-overload]
            self.file.body.check()
        else:
            self._keep(bytes(event))  # type: ignore[call-overload]

    def _keep(self, data: bytes) -> None:
        self._held_bytes += len(data)
        if self._held_bytes > self._fields_bytes:
            raise BodyRefused(f"the form's fields have more than {self._fields_bytes} bytes", 413)
        self._field_pieces.append(data)


def _malformed(error: Exception) -> BodyRefused:
    return BodyRefused(f"the form cannot be understood: {error}", 400)
