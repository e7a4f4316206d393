"""
The answer that has allocated one share, recognized as a whole.

It is what a server answers where a small file has one share for it: no shares that are there, and one
writer. For its twenty tokens Foolscap makes, asks and ends five objects, always to the same effect, which
took a quarter of the time that a client has for such a share. Answers of any other form are Foolscap's.

Source: Foolscap 24.9's documentation ("specifications/pb"), and what it sends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs

from pipegrid.wire.banana import CLOSE, INT, OPEN, STRING, VOCAB
from pipegrid.wire.nothings import NUMBER, byte_pattern, number_of

OPENED = 5
"""Objects in such an answer, itself included."""

TOKENS = 20

MAX_FURL_BYTES = 512
"""Of the writer's; that of a server with ten addresses."""

_SHARE_NUMBER = rb"[\x00-\x7f]{1,2}"


@attrs.frozen(eq=False)
class AllocatedAnswers:
    """
    Which answers may be taken for one.

    Attributes:
        constraint: of the calls that are answered so; of all others answers are left alone.
        interface_name: of a writer.
    """

    constraint: Any
    interface_name: str

    def pattern(self, words: Mapping[int, bytes]) -> re.Pattern[bytes] | None:
        """
        Return what matches such an answer; see ``parsed``, which judges it.

        Args:
            words: what numbers abbreviate on this connection.

        Returns:
            None: it cannot be recognized here.
        """
        numbers = {word: number for number, word in words.items()}
        name = self.interface_name.encode("ascii")
        kinds = [numbers.get(kind, 0x80) for kind in (b"answer", b"tuple", b"set", b"dict")]
        reference = numbers.get(b"my-reference", 0x80)
        if max(*kinds, reference, len(name)) > 0x7F or name in numbers:
            return None
        answer, pair, there, writers = (_opened(place, kind) for place, kind in enumerate(kinds))
        return re.compile(
            b"".join(
                (
                    *(answer, b"(?P<request>", NUMBER, b")", byte_pattern(INT)),
                    *(pair, there, _closed(2), writers),
                    *(b"(?P<share>", _SHARE_NUMBER, b")", byte_pattern(INT)),
                    *(_opened(4, reference), b"(?P<clid>", NUMBER, b")", byte_pattern(INT)),
                    *(byte_pattern(len(name)), byte_pattern(STRING), re.escape(name)),
                    *(b"(?P<size>", _SHARE_NUMBER, b")", byte_pattern(STRING)),
                    *(b"(?P<furl>[!-~]{1,%d})" % MAX_FURL_BYTES, _closed(4)),
                    *(_closed(3), _closed(1), _closed(0)),
                )
            )
        )


class Allocated(NamedTuple):
    """
    What such an answer says.

    Attributes:
        request: number of the call.
        share: number of the share that may be written.
        clid: number of its writer at the other end.
        furl: the writer's.
    """

    request: int
    share: int
    clid: int
    furl: str


def parsed(found: re.Match[bytes]) -> Allocated | None:
    """Return what an answer says that a ``pattern`` has matched; None: it is another after all."""
    furl = found["furl"]
    if number_of(found["size"]) != len(furl):
        return None
    request, share, clid = (number_of(found[name]) for name in ("request", "share", "clid"))
    return Allocated(request, share, clid, furl.decode("ascii"))


def _opened(place: int, kind: int) -> bytes:
    parts = b"(?P<open%d>" % place, NUMBER, b")", byte_pattern(OPEN), byte_pattern(kind)
    return b"".join((*parts, byte_pattern(VOCAB)))


def _closed(place: int) -> bytes:
    return b"(?P=open%d)" % place + byte_pattern(CLOSE)
