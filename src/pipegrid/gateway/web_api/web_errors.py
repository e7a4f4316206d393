"""
Errors of the web API: the status and text of each exception.

Clients compare words of Tahoe-LAFS's texts, which come first: ``NotEnoughSharesError:``, ``No such child:``.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from pipegrid.core.text import printable
from pipegrid.errors import (
    AccessProhibited,
    CapError,
    ChildExists,
    CorruptionError,
    DirectoryError,
    NoSuchChild,
    NotEnoughSharesError,
    PipegridError,
    RollbackError,
    SourceError,
    UncoordinatedWriteError,
    UnhappyError,
    UsageError,
)
from pipegrid.gateway.body_spool import BodyRefused


class WebError(PipegridError):
    """
    A request that gets an error as response.

    Attributes:
        status: of the response.
        headers: further ones.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


@attrs.frozen
class Problem:
    """
    The response for an exception.

    Attributes:
        unexpected: it must be logged, with its traceback.
    """

    status: int
    text: str
    headers: Mapping[str, str] = attrs.field(factory=dict)
    unexpected: bool = False


def no_such_child(name: str) -> WebError:
    """Return the error for a name that is not in its directory."""
    return WebError(404, f"No such child: {printable(name)}")


def problem_of(error: BaseException) -> Problem:
    """Return the response for an exception."""
    if isinstance(error, WebError):
        return Problem(error.status, str(error), error.headers)
    if isinstance(error, BodyRefused):
        return Problem(error.status, str(error))
    if isinstance(error, AccessProhibited):
        return Problem(403, str(error))
    if isinstance(error, NoSuchChild):
        return Problem(404, f"No such child: {printable(error.name)}: {error}")
    if isinstance(error, ChildExists):
        return Problem(409, str(error))
    if isinstance(error, NotEnoughSharesError):
        return Problem(410, _not_enough(error))
    if isinstance(error, (CorruptionError, RollbackError)):
        return Problem(410, f"UnrecoverableFileError: {error}")
    if isinstance(error, UnhappyError):
        return Problem(503, f"UploadUnhappinessError: {error}")
    if isinstance(error, UncoordinatedWriteError):
        return Problem(500, f"UncoordinatedWriteError: {error}")
    if isinstance(error, DirectoryError):
        return Problem(500, f"the directory cannot be read: {error}")
    if isinstance(error, (CapError, UsageError)):
        return Problem(400, str(error))
    if isinstance(error, SourceError):
        return Problem(507, str(error))
    if isinstance(error, PipegridError):
        return Problem(500, str(error))
    return Problem(
        500,
        "the gateway failed unexpectedly; its log has the details",
        unexpected=True,
    )


def _not_enough(error: NotEnoughSharesError) -> str:
    if error.found:
        found = ",".join(f"sh{number}" for number in range(error.found))
        return (
            f"NotEnoughSharesError: ran out of shares: complete={found} pending= overdue= unused= "
            f"need {error.needed}: {error}"
        )
    return f"NoSharesError: no shares (need {error.needed}): {error}"
