"""Results and progress of transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

import attrs

from pipegrid.core.caps import Cap, ChkCap, ChkVerifierCap, LitCap
from pipegrid.errors import CorruptionError

# What transfers tell their callers when they are done.

FileHealth = Literal["healthy", "unspread", "reachable", "damaged", "unavailable", "lost"]


@attrs.frozen
class PutResult:
    """
    One stored file.

    Attributes:
        cap: what gets it back.
        size: plaintext bytes.
        share_bytes: length of each share; 0 if the file lives in its cap.
        shares_placed: share number to the nickname of the server that took it in this upload.
        shares_found: share number to the servers that had it before.
        happiness: servers of happiness reached; 0 if the file lives in its cap.
        dropped: nicknames of servers that were too slow to wait for.
        reasons: nickname of a server to what kept it from taking shares, if anything did.
        elapsed_s: from the start to the last acknowledgement waited for.
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
    One fetched file or range.

    Attributes:
        size: plaintext bytes delivered.
        shares_used: share number to the nickname of the server it came from.
        corrupt: damage that was found on the way and worked around.
        elapsed_s: from the start to the last byte delivered.
        found_bytes: what an interrupted get had left.
        here_bytes: what of that was good, and was not fetched again.
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
        healthy: a good copy of each of ``total_shares`` distinct shares is there, and they are on as many
            servers as can have them now: ``happiness`` is ``possible_happiness``.
        recoverable: at least ``required_shares`` distinct good shares are there.
        good_shares: share number to the nicknames of the servers that hold a good one.
        corrupt: damage found (only with verification); a copy that is damaged may have a good one elsewhere.
        happiness: servers of happiness of the good shares: so many servers hold a share that the others of
            them do not need.
        unreachable: servers that could not be asked.
        reasons: why not, by their nicknames.
        renewed: servers on which leases were added or renewed, if that was asked for.
        lease_problems: sentences, what kept servers from giving one.
        remarks: sentences, what else is wrong with it.
        possible_happiness: the same if all shares were spread over the servers that were asked and answered,
            as far as those have space.
        servers: how many servers were asked, those that did not answer, too.
        share_servers: as ``good_shares``, but with the ids of servers, which differ where nicknames do not.
        answered: id to nickname of each server that said which shares it has.
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
        How it is, in a word.

        * ``"healthy"``: see there.
        * ``"unspread"``: a good copy of every share is there, and more servers could have them.
        * ``"reachable"``: the shares that are missing may all be on servers that are out of reach, and
          nothing else is wrong.
        * ``"damaged"``: something is missing or wrong, and the file can be restored.
        * ``"unavailable"``: it cannot, but servers that are out of reach may have what is missing.
        * ``"lost"``: it cannot.
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
        """Whether servers that are out of reach have the missing shares if they have as many as others."""
        held = Counter(name for names in self.good_shares.values() for name in names)
        usual = -(-self.total_shares // max(1, self.servers))
        most = max([usual, *held.values()])
        missing = self.total_shares - len(self.good_shares)
        return missing <= most * len(self.unreachable)


@attrs.frozen
class RenewResult:
    """
    Leases of one file.

    Attributes:
        leases: share number to the nicknames of the servers that gave a lease on it.
        unreachable: servers that could not be asked.
        reasons: what kept servers that have shares from giving a lease.
    """

    cap: Cap | ChkCap | ChkVerifierCap
    leases: dict[int, list[str]]
    required_shares: int
    total_shares: int
    unreachable: list[str]
    reasons: list[str]

    @property
    def recoverable(self) -> bool:
        """Whether what has a lease now is enough to restore the file."""
        return len(self.leases) >= self.required_shares


@attrs.frozen
class RepairResult:
    """
    A file that was checked, byte for byte, and made whole as far as servers allow.

    Attributes:
        before: what the check found.
        after: the same with what was uploaded; damaged copies stay where they are, and in here, since
            shares cannot be changed.
        uploaded: share number to the nickname of the server that took a new copy.
        renewed: nicknames of the servers on which leases were renewed.
        reasons: what kept servers from taking shares, if anything did.
        elapsed_s: in all.
        reasons_by_server: the same, by nickname.
        absent: nicknames of those of them that were out of reach; one more try may find them.
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
        """Whether there is a good copy of every share now, and they are on as many servers as possible."""
        return self.after.is_complete and self.after.is_spread


@attrs.frozen
class ServerStatus:
    """
    What is known of one server.

    Attributes:
        reason: why it is not reachable.
        no_uploads: why it is given no new shares, though it may be reachable.
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

    @property
    def writable(self) -> bool:
        """Whether it seems to take shares: it is certified, and neither full nor read-only, as it says."""
        return self.reachable and self.available_bytes != 0 and self.no_uploads is None


# Telling a caller how far a transfer has come.
#
# What is told never falls and is never repeated, whatever the transfer has to do again.

Progress = Callable[[int, int], None]
"""Called with what is done and what there is to do, in the unit that the transfer names."""


@attrs.frozen
class PutReports:
    """
    What the caller of a put is told, each as a part of a whole; None: does not want to know.

    Attributes:
        progress: of bytes of shares, those that are acknowledged.
        found: of bytes of shares, those that servers had before.
        hashing: of bytes of the file, those that its key was made from; before the others.
        cap_known: not a part, but the file's cap, as soon as all of it is coded and long before it is stored;
            perhaps more than once. Not told of files that live in their caps.
    """

    progress: Progress | None = None
    found: Progress | None = None
    hashing: Progress | None = None
    cap_known: Callable[[ChkCap], None] | None = None


class ProgressReport:
    """
    One transfer's reports to its caller, if there is one who wants to know.

    Args:
        total: what there is to do in all.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._told = -1

    @property
    def is_wanted(self) -> bool:
        """Whether anybody is told; if not, nothing need be counted."""
        return self._progress is not None

    def more(self, amount: int) -> None:
        """There is more to do than was thought."""
        self._total += amount

    def report(self, done: int) -> None:
        """Tell the caller that ``done`` of ``total`` is done, unless as much was told already."""
        if self._progress is not None and done > self._told:
            self._told = done
            self._progress(done, self._total)

    def finish(self) -> None:
        """All is done that was worth doing."""
        self.report(self._total)
