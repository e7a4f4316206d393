"""
Paths and lists of restic's REST protocol, versions 1 and 2.

Source: restic's documentation, "References", section "REST Backend"; the behaviour of rest-server and of
``rclone serve restic``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote_to_bytes

import attrs

from pipegrid.core.text import composed

CONFIG = "config"
DATA = "data"
INDEX = "index"
KEYS = "keys"
LOCKS = "locks"
SNAPSHOTS = "snapshots"
KINDS = (DATA, INDEX, KEYS, LOCKS, SNAPSHOTS)
"""Names of a repository's directories, one for each kind of object; the file ``config`` is next to them."""

V1_TYPE = "application/vnd.x.restic.rest.v1"
V2_TYPE = "application/vnd.x.restic.rest.v2"

MAX_FOLDERS = 2
"""Maximum number of names in a repository's path: ``NAME`` or ``USER/NAME``, as in rest-server."""

MAX_NAME_CHARACTERS = 100
MAX_PATH_BYTES = 2000
"""Maximum size of a percent-encoded path: two names in UTF-8, a kind and an id."""

_BUCKET = re.compile(r"[0-9a-f]{2}")
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
_ID = re.compile(r"[0-9a-f]{64}")


@attrs.frozen
class RepositoryPath:
    """
    What the path of a request names.

    Attributes:
        folders: the repository's path, as one or two names.
        kind: one of ``KINDS``, or ``CONFIG``; empty for the repository itself.
        object_id: 64 hexadecimal digits; empty for the list of a kind, and for ``CONFIG``.
    """

    folders: tuple[str, ...]
    kind: str = ""
    object_id: str = ""

    @property
    def is_object(self) -> bool:
        """Whether the path names a single object."""
        return self.kind == CONFIG or bool(self.object_id)


def parse_path(path: bytes) -> RepositoryPath | None:
    """
    Return what a path below ``/restic/`` names; None if the protocol has no such path.

    Args:
        path: percent-encoded, as in the request, without the query.
    """
    if len(path) > MAX_PATH_BYTES:
        return None
    try:
        return _parsed(
            [composed(unquote_to_bytes(part).decode("utf-8")) for part in path.split(b"/")]
        )
    except UnicodeDecodeError:
        return None


def _parsed(names: Sequence[str]) -> RepositoryPath | None:
    is_directory = names[-1] == ""  # nothing follows the last slash
    if is_directory:
        names = names[:-1]
    depth = next((at for at, name in enumerate(names) if _is_reserved(name)), len(names))
    folders, rest = tuple(names[:depth]), names[depth:]
    if not 1 <= len(folders) <= MAX_FOLDERS or not all(map(is_folder_name, folders)):
        return None
    if not rest:
        return RepositoryPath(folders)
    kind, *ids = rest
    if not ids and not (kind == CONFIG and is_directory):
        return RepositoryPath(folders, kind)
    if kind == CONFIG or is_directory or len(ids) > 1 or not is_object_id(ids[0]):
        return None
    return RepositoryPath(folders, kind, ids[0])


def _is_reserved(name: str) -> bool:
    return name in KINDS or name == CONFIG


def is_folder_name(name: str) -> bool:
    """Return whether a repository or a user's folder can have this name."""
    return (
        0 < len(name) <= MAX_NAME_CHARACTERS
        and name.isprintable()
        and not name.startswith(".")
        and "/" not in name
        and "\\" not in name
        and not _is_reserved(name)
    )


def is_object_id(text: str) -> bool:
    """Return whether a text is a SHA-256 in lower-case hexadecimal digits, as restic writes it."""
    return _ID.fullmatch(text) is not None


def is_bucket(text: str) -> bool:
    """Return whether a text is the name of a subdirectory of ``data``."""
    return _BUCKET.fullmatch(text) is not None


def bucket_of(object_id: str) -> str:
    """Return the name of an object's subdirectory of ``data``, as in restic's layout on a disk."""
    return object_id[:2]


# Lists.


def list_type(accept: str) -> str:
    """Return the media type of a list for a client that sends this ``Accept`` header."""
    return V2_TYPE if accept.strip() == V2_TYPE else V1_TYPE


def list_items(objects: Iterable[tuple[str, int]], kind: str) -> list[bytes]:
    """Return the items of a list as JSON, from the ids of objects and their sizes in bytes."""
    if kind == V1_TYPE:
        return [json.dumps(object_id).encode() for object_id, _ in objects]
    return [
        json.dumps({"name": object_id, "size": size}, separators=(",", ":")).encode()
        for object_id, size in objects
    ]


# A range that begins after the end of an object is an error, so that restic does not retry the request.


@attrs.frozen
class ObjectRange:
    """
    The part of an object that a request asks for.

    Attributes:
        start, length: in bytes.
        content_range: header ``Content-Range`` of a partial response; empty for the whole object.
    """

    start: int
    length: int
    content_range: str = ""


def parse_object_range(header: str | None, size: int) -> ObjectRange | None:
    """
    Return the part of an object of ``size`` bytes that a ``Range`` header requests; None if the range begins
    after the end.

    A header that is not a single range of bytes is ignored, as HTTP permits.
    """
    match = _RANGE.fullmatch(header.strip()) if header is not None and len(header) < 100 else None
    first, last = (match[1], match[2]) if match is not None else ("", "")
    if not first and not last:
        return ObjectRange(0, size)
    if first:
        start, end = int(first), min(int(last), size - 1) if last else size - 1
        if last and int(last) < start:
            return ObjectRange(0, size)
    else:
        start, end = max(0, size - int(last)), size - 1
    if start > end:
        return None
    return ObjectRange(start, end - start + 1, f"bytes {start}-{end}/{size}")
