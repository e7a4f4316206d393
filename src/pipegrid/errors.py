"""
All public exceptions, whose classes say who is at fault, and whether another server may succeed.

The text of each error is one sentence: what failed, where, and what to do. Facts are attributes.
"""

from __future__ import annotations

TYPE_CHECKING = False  # instead of the import from ``typing``, which is slow
if TYPE_CHECKING:
    from typing import TypeVar

    E = TypeVar("E", bound="PipegridError")


class PipegridError(Exception):
    """
    An error that PipeGrid foresaw; the text says what to do.

    Attributes:
        parameters: words of the text that name arguments of a call; a command replaces them by its options.
    """

    parameters: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        """
        Return how to copy or unpickle the error with its attributes.

        The default calls the class with the text alone, which some classes do not accept. A process pool
        would then wait forever for a result that it cannot unpickle.
        """
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[PipegridError], args: tuple[object, ...]) -> PipegridError:
    return kind.__new__(kind, *args)


def naming(error: E, *parameters: str) -> E:
    """
    Return ``error``, after marking ``parameters`` as words of its text that name arguments of the call.
    """
    error.parameters = parameters
    return error


class UsageError(PipegridError):
    """The caller asked for something impossible; repeating the call cannot help."""


class PipelineStopped(UsageError):
    """
    An earlier call of this pipeline failed, or the pipeline was aborted; start again with a new pipeline.
    """


class RemoteCallError(PipegridError):
    """
    A call on a pipeline failed at the peer, over a protocol that passes failures on as text (Foolscap).

    Attributes:
        remote_type: the exception's class at the peer, with its module, as the peer reports it.
        remote_traceback: the peer's traceback, or what the peer sent instead.
    """

    def __init__(self, message: str, remote_type: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class CapError(UsageError):
    """A capability string is malformed, or is of a kind that this operation cannot use."""


class CapMismatch(CapError):
    """A capability does not fit the stored file: one of its characters is wrong; copy it again."""


class SegmentTooLarge(UsageError):
    """
    A file was stored in segments that need more memory than is allowed.

    Attributes:
        segment_bytes: the size of the file's segments.
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


class AccessProhibited(UsageError):
    """An object is blocked by the directory's ``access.blacklist``; the text has the reason."""


class DirectoryError(PipegridError):
    """A file that should be a directory does not contain one; perhaps the cap names a plain file."""


class CannotReach(PipegridError):
    """Something that a client keeps is unreadable, so none of the client's leases is released."""


class _NamedChildError(UsageError):
    """
    An error about a name in a directory.

    Attributes:
        name: the name as it was given.
        perhaps_made: whether an earlier attempt may have made the change, and another client undone it since.
    """

    def __init__(self, message: str, name: str, perhaps_made: bool = False) -> None:
        super().__init__(message)
        self.name = name
        self.perhaps_made = perhaps_made


class NoSuchChild(_NamedChildError):
    """
    A directory has no child of this name; list it to see what exists.

    Attributes:
        name: the name as it was given.
        perhaps_made: whether an earlier attempt may have made the change, and another client undone it since.
    """


class ChildExists(_NamedChildError):
    """
    A directory already has a child of this name; take another name, or allow replacing it.

    Attributes:
        name: the name as it was given.
        perhaps_made: whether an earlier attempt may have made the change, and another client undone it since.
    """


class SourceError(PipegridError):
    """The local file to be stored could not be read, or it changed while it was read."""


class SinkError(PipegridError):
    """The local file for the plaintext could not be written."""


class InvitationError(PipegridError):
    """An invitation to a grid could not be given or taken; nothing was changed; ask for a new code."""


class GridError(PipegridError):
    """An operation on the grid failed; it may succeed later, or with more servers."""


class UnhappyError(GridError):
    """
    The shares could not be spread over enough servers, or too few shares were stored to restore the file.

    Attributes:
        reached: the servers of happiness that were reached, or the number of shares that were stored.
        wanted: the servers of happiness that the caller requires, or the number of shares that the file
            needs.
        absent: how many servers did not answer in time; with them the operation may succeed.
    """

    def __init__(self, message: str, reached: int, wanted: int, absent: int = 0) -> None:
        super().__init__(message)
        self.reached = reached
        self.wanted = wanted
        self.absent = absent


class NotEnoughSharesError(GridError):
    """
    Fewer good shares were found than the file needs.

    Attributes:
        found: how many distinct good shares were found.
        needed: how many distinct shares every reader needs (k).
        absent: how many servers did not answer in time; they may have more shares.
        absent_shares: how many more shares these servers have if each server has its part of all shares.
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
    Another client changed a mutable file at the same time; read it again, and decide.

    Attributes:
        theirs: the sequence number of the version that the servers have now, or None if unknown.
        ours: the sequence number of the version to be written, or None if the error came before it was known.
    """

    def __init__(self, message: str, theirs: int | None = None, ours: int | None = None) -> None:
        super().__init__(message)
        self.theirs = theirs
        self.ours = ours


class RollbackError(GridError):
    """
    The servers offer an older version of a mutable file than was seen before.

    Attributes:
        offered: the sequence number of the newest version that the servers offer.
        seen: the sequence number of the newest version that this client has seen.
    """

    def __init__(self, message: str, offered: int, seen: int) -> None:
        super().__init__(message)
        self.offered = offered
        self.seen = seen


class ServerError(PipegridError):
    """
    One server failed; a transfer continues with the others.

    Attributes:
        server: the nickname or id of the server, as a person would know it.
        may_have_happened: whether the server may have carried out the request nevertheless.
    """

    def __init__(self, message: str, server: str = "", may_have_happened: bool = False) -> None:
        super().__init__(message)
        self.server = server
        self.may_have_happened = may_have_happened


class ServerUnreachable(ServerError):
    """The server could not be reached, or the connection was lost; it may be reachable later."""


class WriteLost(ServerUnreachable):
    """
    The connection was lost during a write whose bytes were already released; the write may have been
    carried out.

    The server is reachable, or may be soon: make the bytes again and repeat the write.
    """


class ServerTimeout(ServerError):
    """The server did not answer in time; it may answer later."""


class ServerRefused(ServerError):
    """The server understood the request and rejected it; another server may accept it."""


class WrongSwissnum(ServerRefused):
    """
    The secret in the address is not the server's, so the server did nothing; another address may be right.
    """


class NoSuchShare(ServerRefused):
    """The server has no such share, or no such unfinished upload."""


class NoSpace(ServerRefused):
    """The server has no space for the share."""


class QuotaReached(NoSpace):
    """The server's quota leaves no space for the share."""


class Overloaded(ServerRefused):
    """The server holds too much in memory for other clients now; it may accept the request later."""


class WrongSecret(ServerRefused):
    """The server has the share or upload under another secret."""


class ConflictingWrite(ServerRefused):
    """Different bytes were written before to the same place of an unfinished share."""


class ServerProtocolError(ServerError):
    """The server's answer violates the protocol; do not trust it further."""


def is_absence(error: BaseException | None) -> bool:
    """Return whether a server that failed with ``error`` is unreachable or too busy, and may recover."""
    return isinstance(error, (ServerUnreachable, ServerTimeout, Overloaded))


class CorruptionError(PipegridError):
    """
    Bytes do not match their hash.

    Attributes:
        share_number: the number of the share, or None if the file itself is inconsistent.
        offset: the offset in the share data at which the wrong part begins, or None.
        server: the server that sent the bytes, or "" if unknown.
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
