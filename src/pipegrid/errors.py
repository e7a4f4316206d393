"""
Every public exception of PipeGrid.

The classes answer two questions: whose fault is it, and is trying elsewhere useful?
The text of each error is one sentence for a person: what failed, where, what to do.
Facts are attributes. Broken invariants are assertions, not errors.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from typing import TypeVar

    E = TypeVar("E", bound="PipegridError")


class PipegridError(Exception):
    """
    Something went wrong in a way that PipeGrid foresaw; the text says what to do.

    Attributes:
        parameters: words of the text that name arguments of a call, so that a command can name its options.
    """

    parameters: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        """
        Say how to make it again, in another process or as a copy, with its facts.

        Python's own way calls the class with the text alone, which some do not take: a pool of processes then
        waits for ever for a result that it cannot read.
        """
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[PipegridError], args: tuple[object, ...]) -> PipegridError:
    return kind.__new__(kind, *args)


def naming(error: E, *parameters: str) -> E:
    """Return an error, in whose text these words name arguments of the call that failed."""
    error.parameters = parameters
    return error


class UsageError(PipegridError):
    """The caller asked for the impossible; repeating the same call cannot help."""


class PipelineStopped(UsageError):
    """An earlier call of this pipeline failed, or it was aborted; start over with a new one."""


class RemoteCallError(PipegridError):
    """
    A call on a pipeline failed at the peer, whose protocol hands on failures as text: Foolscap's does.

    Attributes:
        remote_type: the name of the exception's class at the peer, with its module; as the peer says.
        remote_traceback: the peer's traceback, or what it sent instead.
    """

    def __init__(self, message: str, remote_type: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class CapError(UsageError):
    """A capability string is malformed, or is of a kind that this operation cannot use."""


class CapMismatch(CapError):
    """A capability does not fit the file that is stored: a character of it is wrong; copy it again."""


class SegmentTooLarge(UsageError):
    """
    A file was stored in segments that take more memory than was allowed.

    Attributes:
        segment_bytes: how large they are.
    """

    def __init__(self, segment_bytes: int, allowed_bytes: int) -> None:
        mib = 1 << 20
        super().__init__(
            f"this file was stored in segments of {segment_bytes / mib:.4g} MiB, several of which have to "
            f"be held in memory, and {allowed_bytes / mib:.4g} MiB are allowed; if you trust the source of "
            f"the cap, allow more with max_segment_bytes = {-(-segment_bytes // mib)}MiB"
        )
        self.parameters = ("max_segment_bytes = ",)
        self.segment_bytes = segment_bytes


class DirectoryError(PipegridError):
    """A file that should be a directory does not hold one; perhaps the cap is that of a file."""


class NoSuchChild(UsageError):
    """
    A directory has no child of this name; list it to see what exists.

    Attributes:
        name: as it was given.
        perhaps_made: an earlier try of the change may have been stored, and others may have undone it since.
    """

    def __init__(self, message: str, name: str, perhaps_made: bool = False) -> None:
        super().__init__(message)
        self.name = name
        self.perhaps_made = perhaps_made


class ChildExists(UsageError):
    """
    A directory has a child of this name already; take another name, or allow to replace it.

    Attributes:
        name: as it was given.
        perhaps_made: an earlier try of the change may have been stored, and others may have undone it since.
    """

    def __init__(self, message: str, name: str, perhaps_made: bool = False) -> None:
        super().__init__(message)
        self.name = name
        self.perhaps_made = perhaps_made


class SourceError(PipegridError):
    """The local file to be stored could not be read, or changed while it was read."""


class SinkError(PipegridError):
    """The local place that the plaintext goes to could not be written."""


class GridError(PipegridError):
    """The grid could not do it; another time, or with more servers, it may."""


class UnhappyError(GridError):
    """
    The shares could not be spread over enough servers, or too few were stored to get the file back.

    Attributes:
        reached: servers of happiness that were reached; or shares that were stored.
        wanted: servers of happiness that the caller wanted; or shares that it takes.
        absent: servers that were out of reach, or did not answer in time; with them it may be enough.
    """

    def __init__(self, message: str, reached: int, wanted: int, absent: int = 0) -> None:
        super().__init__(message)
        self.reached = reached
        self.wanted = wanted
        self.absent = absent


class NotEnoughSharesError(GridError):
    """
    Fewer good shares could be found than the file needs.

    Attributes:
        found: distinct good shares that were found.
        needed: distinct shares that any reader needs (k).
        absent: servers that were out of reach, or did not answer in time; they may have more.
        absent_shares: how many more those have, where every server has its part of all.
    """

    def __init__(
        self,
        message: str,
        found: int,
        needed: int,
        absent: int = 0,
        absent_shares: int | None = None,
    ) -> None:
        super().__init__(message)
        self.found = found
        self.needed = needed
        self.absent = absent
        self.absent_shares = absent if absent_shares is None else absent_shares


class UncoordinatedWriteError(GridError):
    """
    Somebody else changed a mutable file at the same time; read it again, and decide.

    Attributes:
        theirs: the sequence number of the version that is there now, or None if it is not known.
        ours: that of the version which was to be written, if it came so far.
    """

    def __init__(self, message: str, theirs: int | None = None, ours: int | None = None) -> None:
        super().__init__(message)
        self.theirs = theirs
        self.ours = ours


class RollbackError(GridError):
    """
    The servers offer an older version of a mutable file than was seen before.

    Attributes:
        offered: sequence number of the newest version that could be had.
        seen: that of the newest one seen before, by this client.
    """

    def __init__(self, message: str, offered: int, seen: int) -> None:
        super().__init__(message)
        self.offered = offered
        self.seen = seen


class ServerError(PipegridError):
    """
    One server failed; a transfer goes on with the others.

    Attributes:
        server: the nickname or id of the server, as a person would know it.
        may_have_happened: whether the server may have carried out the request all the same.
    """

    def __init__(self, message: str, server: str = "", may_have_happened: bool = False) -> None:
        super().__init__(message)
        self.server = server
        self.may_have_happened = may_have_happened


class ServerUnreachable(ServerError):
    """No connection to the server could be made, or it was lost; later it may work again."""


class WriteLost(ServerUnreachable):
    """
    The connection was lost under a write whose bytes were let go of; it may have been carried out.

    The server can be reached, or may be soon: make the bytes again and write them again.
    """


class ServerTimeout(ServerError):
    """The server did not answer in time; later it may."""


class ServerRefused(ServerError):
    """The server understood the request and will not do it; another server may."""


class WrongSwissnum(ServerRefused):
    """The secret in the server's address is not its own, so it did nothing; another address may be right."""


class NoSuchShare(ServerRefused):
    """The server has no such share, or no such unfinished upload."""


class NoSpace(ServerRefused):
    """The server has no room for the share."""


class Overloaded(ServerRefused):
    """The server has too much in memory for others just now; later it may do it."""


class WrongSecret(ServerRefused):
    """The server knows the share or upload under another secret."""


class ConflictingWrite(ServerRefused):
    """Other bytes than these were written to the same place of an unfinished share before."""


class ServerProtocolError(ServerError):
    """The server answered with something that is not the protocol; do not trust it further."""


def is_absence(error: BaseException | None) -> bool:
    """Whether a server that failed so is not in reach, or too busy, and may do the same later."""
    return isinstance(error, (ServerUnreachable, ServerTimeout, Overloaded))


class CorruptionError(PipegridError):
    """
    Bytes disagree with a hash.

    Attributes:
        share_number: the share, or None if the file itself is inconsistent.
        offset: offset in the share data of the part that failed (its first byte), or None.
        server: the server that gave the bytes, where known.
    """

    def __init__(
        self,
        message: str,
        share_number: int | None = None,
        offset: int | None = None,
        server: str = "",
    ) -> None:
        super().__init__(message)
        self.share_number = share_number
        self.offset = offset
        self.server = server
