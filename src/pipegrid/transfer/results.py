"""Results and progress of transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import attrs

from pipegrid.core.caps import Cap, ChkCap, ChkVerifierCap, LitCap
from pipegrid.errors import CorruptionError

if TYPE_CHECKING:
    from pipegrid.wire.storage_messages import ServerIdentity

# What transfers return to their callers.

FileHealth = Literal["healthy", "unspread", "reachable", "damaged", "unavailable", "lost"]


@attrs.frozen
class PutResult:
    """
    One stored file.

    Attributes:
        cap: restores the file.
        size: number of plaintext bytes.
        share_bytes: length of each share; 0 for a literal cap.
        shares_placed: by share number, the nickname of the server that accepted the share now.
        shares_found: by share number, the servers that had the share before.
        happiness: servers of happiness reached; 0 for a literal cap.
        dropped: servers given up as stragglers.
        reasons: why servers did not accept shares, by nickname.
        elapsed_s: seconds until the last acknowledgement that was waited for.
    """

    cap: ChkCap | LitCap
    size: int
    share_bytes: int
    shares_placed: dict[int, str]
    shares_found: dict[int, list[str]]
    happiness: int
    elapsed_s: float
    dropped: list[str] = attrs.field(factory=list)
    reasons: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen
class GetResult:
    """
    One downloaded file or range.

    Attributes:
        size: plaintext bytes delivered.
        shares_used: by share number, its server's nickname.
        corrupt: damage that did not prevent the download.
        elapsed_s: seconds until the last byte was delivered.
        found_bytes: bytes left by an interrupted get.
        here_bytes: those of ``found_bytes`` that were good, and not fetched again.
    """

    size: int
    shares_used: dict[int, str]
    corrupt: list[CorruptionError]
    elapsed_s: float = 0.0
    found_bytes: int = 0
    here_bytes: int = 0


@attrs.frozen
class CheckResult:
    """
    The health of one file.

    Attributes:
        healthy: every share has a good copy, and they are on as many servers as can have them now.
        recoverable: at least ``required_shares`` distinct shares have a good copy.
        good_shares: by share number, nicknames of the servers with a good copy.
        corrupt: damage found (only with verification); a damaged share may have a good copy on another
            server.
        happiness: servers of happiness of the good shares.
        unreachable: servers that could not be asked.
        reasons: why servers could not be asked, by nickname.
        renewed: servers that added or renewed leases.
        lease_problems: sentences: why servers gave no lease.
        remarks: sentences about other problems.
        possible_happiness: happiness if all shares were spread over the servers that responded and have
            space.
        servers: number of servers, including those that did not respond.
        share_servers: as ``good_shares``, but with ids, which are unique.
        answered: by server id, nicknames of the servers that listed their shares.
    """

    cap: Cap | ChkCap | ChkVerifierCap
    healthy: bool
    recoverable: bool
    good_shares: dict[int, list[str]]
    corrupt: list[CorruptionError]
    happiness: int
    required_shares: int
    total_shares: int
    unreachable: list[str]
    reasons: dict[str, str] = attrs.field(factory=dict)
    renewed: list[str] = attrs.field(factory=list)
    lease_problems: list[str] = attrs.field(factory=list)
    remarks: list[str] = attrs.field(factory=list)
    possible_happiness: int = 0
    servers: int = 0
    share_servers: dict[int, list[str]] = attrs.field(factory=dict)
    answered: dict[str, str] = attrs.field(factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether there is a good copy of every share."""
        return len(self.good_shares) == self.total_shares

    @property
    def is_spread(self) -> bool:
        """Whether the shares are on as many servers as can have them now."""
        return self.happiness >= self.possible_happiness

    @property
    def state(self) -> FileHealth:
        """
        The state in one word.

        * ``"healthy"``: see the attribute ``healthy``.
        * ``"unspread"``: every share has a good copy, but the shares could be on more servers.
        * ``"reachable"``: the missing shares may all be on unreachable servers, and nothing else is wrong.
        * ``"damaged"``: something is missing or wrong, but the file can be restored.
        * ``"unavailable"``: the file cannot be restored, but unreachable servers may have the missing shares.
        * ``"lost"``: the file cannot be restored.
        """
        if not self.recoverable:
            return "unavailable" if self.unreachable else "lost"
        if self.healthy:
            return "healthy"
        if self.corrupt or self.remarks:
            return "damaged"
        if self.is_complete:
            return "damaged" if self.is_spread else "unspread"
        return "reachable" if self._may_be_out_of_reach() else "damaged"

    def _may_be_out_of_reach(self) -> bool:
        """
        Return whether the unreachable servers may have all missing shares, if each has as many shares as
        other servers.
        """
        held = Counter(name for names in self.good_shares.values() for name in names)
        usual = -(-self.total_shares // max(1, self.servers))
        most = max([usual, *held.values()])
        missing = self.total_shares - len(self.good_shares)
        return missing <= most * len(self.unreachable)


@attrs.frozen
class RenewResult:
    """
    The leases of one file.

    Attributes:
        leases: by share number, the servers that gave a lease on the share.
        unreachable: servers that could not be asked.
        reasons: why servers with shares gave no lease.
    """

    cap: Cap | ChkCap | ChkVerifierCap
    leases: dict[int, list[str]]
    required_shares: int
    total_shares: int
    unreachable: list[str]
    reasons: list[str]

    @property
    def recoverable(self) -> bool:
        """Whether the shares with a lease suffice to restore the file."""
        return len(self.leases) >= self.required_shares


@attrs.frozen
class RepairResult:
    """
    A file that was checked, and repaired as far as servers allow.

    Attributes:
        before: the result of the check.
        after: ``before`` with the new shares added; damaged copies remain, since shares cannot be changed.
        uploaded: by share number, the server that accepted a new copy.
        renewed: servers that renewed leases.
        reasons: why servers did not accept shares.
        elapsed_s: total time in seconds.
        reasons_by_server: the same reasons, by nickname.
        absent: servers that were unreachable; a later repair may reach them.
    """

    cap: Cap | ChkCap | ChkVerifierCap
    before: CheckResult
    after: CheckResult
    uploaded: dict[int, str]
    renewed: list[str]
    reasons: list[str]
    elapsed_s: float
    reasons_by_server: dict[str, str] = attrs.field(factory=dict)
    absent: list[str] = attrs.field(factory=list)

    @property
    def whole(self) -> bool:
        """Whether every share has a good copy now, and the shares are on as many servers as possible."""
        return self.after.is_complete and self.after.is_spread


class ServerStatus(NamedTuple):
    """
    What is known of one server.

    Attributes:
        reason: why the server is not reachable.
        no_uploads: why the server gets no new shares, even if it is reachable.
        certified_by: the grid manager that has certified the server; None: no configured one has.
        certified_until: when the certificate expires or has expired: ``2027-01-31T12:00:00+00:00``.
    """

    nickname: str
    server_id: str
    protocol: str
    address: str
    reachable: bool
    reason: str | None
    rtt_s: float | None
    version: str | None
    available_bytes: int | None
    no_uploads: str | None = None
    certified_by: str | None = None
    certified_until: str | None = None

    @property
    def writable(self) -> bool:
        """
        Whether the server seems to accept shares: it is certified, and has reported that it is neither full
        nor read-only.
        """
        return self.reachable and self.available_bytes != 0 and self.no_uploads is None


# Reporting the progress of a transfer to its caller.
#
# The reported number never falls and is never repeated, even if the transfer must repeat work.

Progress = Callable[[int, int], None]
"""A function that is called with the amount done and the total, in a unit that depends on the transfer."""


Traffic: TypeAlias = "Callable[[ServerIdentity, float, float, int], None]"
"""
A function that is called for bytes of shares that passed between the client and one server. Its arguments:
the server; when the bytes were sent or requested; when they were acknowledged or had arrived (both times by
the grid's clock); the number of bytes.
"""


class PutReports(NamedTuple):
    """
    The progress callbacks of a put; None: no reports.

    Attributes:
        progress: gets acknowledged and total bytes of shares.
        found: gets the bytes of shares that servers had before, and total bytes of shares.
        hashing: before the other reports; gets how many bytes of the file were read to derive its key, and
            the total.
        cap_known: gets the file's cap as soon as the file is encoded, long before it is stored; may be called
            more than once. Not called for literal caps.
        traffic: gets the bytes that each server has acknowledged, message by message.
    """

    progress: Progress | None = None
    found: Progress | None = None
    hashing: Progress | None = None
    cap_known: Callable[[ChkCap], None] | None = None
    traffic: Traffic | None = None


class ProgressReport:
    """
    Reports the progress of one transfer to its caller, if the caller wants it.

    Args:
        total: total amount of work.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._reported_bytes = -1

    @property
    def is_wanted(self) -> bool:
        """Whether there is a callback; if not, nothing need be counted."""
        return self._progress is not None

    def more(self, amount: int) -> None:
        """Increase ``total`` by an additional amount of work."""
        self._total += amount

    def report(self, done: int) -> None:
        """Report that ``done`` of ``total`` is done, unless this or a higher number was already reported."""
        if self._progress is not None and done > self._reported_bytes:
            self._reported_bytes = done
            self._progress(done, self._total)

    def finish(self) -> None:
        """Report that all is done."""
        self.report(self._total)
