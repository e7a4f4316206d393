"""The stores for the files of a tree upload, and objects known from earlier runs."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.python.failure import Failure

from pipegrid.core.caps import ChkCap, LitCap, is_literal_size
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.text import printable
from pipegrid.errors import SourceError
from pipegrid.flow.concurrency_limits import SmallFileCapacity
from pipegrid.grid.file_grid import Grid
from pipegrid.transfer.results import CheckResult, Progress
from pipegrid.tree.local_walk import FileMet

if TYPE_CHECKING:
    from pipegrid.transfer.upkeep import Upkeep, UpkeepOutcome


# The files of a tree are stored on a grid or, in a dry run, nowhere.

Content = bytes | io.FileIO | None
ImmutableFileCap = ChkCap | LitCap


class Health(NamedTuple):
    """
    How well a file is stored on the grid.

    Attributes:
        whole: whether the file is as reliable as after a put.
        leased: whether enough servers have given leases; also true if no leases were requested.
    """

    whole: bool
    leased: bool = True


class GridFiles:
    """
    Stores files on a grid.

    Args:
        options: the options of ``Grid.put`` for all files.
    """

    def __init__(self, grid: Grid, **options: Any) -> None:
        self._grid = grid
        self._options = options
        params = options.get("params") or grid.config.params
        self._happy = options.get("happy") or min(grid.config.happy, params.total_shares)
        self._opening: Deferred[None] | None = None
        self._upkeep: Upkeep | None = None
        self._waiting: list[tuple[ImmutableFileCap, Deferred[Any]]] = []
        self._checks: set[Deferred[Any]] = set()
        self._watching = False

    @property
    def small_file_capacity(self) -> SmallFileCapacity:
        """How many small files the servers accept at the same time."""
        return self._grid._small_file_capacity

    def expect(self, objects: int) -> None:
        """
        Announce how many objects will be stored; for many, connections to servers are opened in advance.
        """
        self._grid._expect(objects)

    def put(
        self,
        source: Content,
        size: int,
        cap_known: Callable[[ChkCap], None] | None,
        progress: Progress | None,
    ) -> Deferred[tuple[ImmutableFileCap, bool]]:
        """
        Store one file; see ``Grid.put``. ``source`` is None only for stores that read nothing.

        The Deferred fires with the cap of the file, and whether servers already had all its shares.
        """
        assert source is not None
        running = self._grid.put(source, cap_known=cap_known, progress=progress, **self._options)
        return running.addCallback(
            lambda result: (result.cap, bool(result.shares_found) and not result.shares_placed)
        )

    def check(self, cap: ImmutableFileCap) -> Deferred[Health]:
        """
        Count the shares of a file, and renew their leases, in one batch with other checks; the Deferred fires
        with the file's health.
        """
        checked: Deferred[Any] = Deferred()
        if self._upkeep is not None:
            self._begin(self._upkeep, cap, checked)
        else:
            self._waiting.append((cap, checked))
            if self._opening is None:
                # Imported here, since most runs check no objects.
                from pipegrid.transfer.upkeep import UpkeepRequest

                self._opening = self._grid.upkeep(UpkeepRequest(add_lease=True)).addCallback(
                    self._opened
                )
                self._opening.addErrback(self._not_opened)
        return checked.addCallback(self._judge)

    def close(self) -> Deferred[Any]:
        """Cancel all checks; the Deferred fires when they have ended."""
        if self._upkeep is not None:
            return self._upkeep.close()
        if self._opening is not None:
            self._opening.cancel()
        return succeed(None)

    def _opened(self, upkeep: Upkeep) -> None:
        self._upkeep = upkeep
        waiting, self._waiting = self._waiting, []
        for cap, checked in waiting:
            self._begin(upkeep, cap, checked)

    def _begin(self, upkeep: Upkeep, cap: ImmutableFileCap, checked: Deferred[Any]) -> None:
        self._checks.add(checked)

        def ended(outcome: UpkeepOutcome) -> None:
            self._checks.discard(checked)
            checked.callback(outcome)

        upkeep.begin(cap, ended)
        if not self._watching:
            self._watching = True
            Deferred.fromCoroutine(upkeep.finished()).addBoth(self._finished)

    def _finished(self, failure: Failure | None) -> None:
        """
        Handle the end of all checks. If they ended with an unexpected error, fail the checks that have no
        result yet, so that no caller waits forever.
        """
        self._watching = False
        if failure is not None:
            checks, self._checks = self._checks, set()
            for checked in checks:
                checked.errback(failure)

    def _not_opened(self, failure: Failure) -> None:
        self._opening = None
        waiting, self._waiting = self._waiting, []
        if not failure.check(CancelledError):
            for _, checked in waiting:
                checked.errback(failure)

    def _judge(self, outcome: Any) -> Health:
        assert isinstance(outcome, CheckResult)
        return Health(
            outcome.recoverable and outcome.happiness >= self._happy,
            not outcome.lease_problems or len(outcome.renewed) >= self._happy,
        )


class DryRunStore:
    """
    A store for dry runs: stores nothing, and counts what would be stored.

    Attributes:
        objects, bytes: number and size of files and directories, before they are encoded.
        checks: number of known objects that would be checked.
    """

    def __init__(self, params: Params) -> None:
        self._params = params
        self.objects = self.bytes = self.checks = 0

    @property
    def small_file_capacity(self) -> SmallFileCapacity:
        """``ANY``, since nothing is sent."""
        return SmallFileCapacity.ANY

    def expect(self, objects: int) -> None:
        """Do nothing, since nothing is sent."""

    def put(
        self, source: Content, size: int, *_: object
    ) -> Deferred[tuple[ImmutableFileCap, bool]]:
        """Count the file, and return an invented cap of the right length; the callbacks are not called."""
        if is_literal_size(size):
            return succeed((LitCap(b"?" * size), False))
        self.objects += 1
        self.bytes += size
        digest = hashlib.sha256(b"%d" % self.objects).digest()
        k, n = self._params.required_shares, self._params.total_shares
        return succeed((ChkCap(digest[:16], digest, k, n, size), False))

    def check(self, cap: ImmutableFileCap) -> Deferred[Health]:
        """Count a check; return a Deferred that has already fired with the health of a complete file."""
        self.checks += 1
        return succeed(Health(True))

    def close(self) -> Deferred[Any]:
        """Return a Deferred that has already fired, since no check is running."""
        return succeed(None)


TreeStore = GridFiles | DryRunStore


def unreadable_root(root: object, error: OSError) -> SourceError:
    """Return the error for a tree whose root cannot be read, perhaps because it is a file."""
    called = printable(str(root))
    if isinstance(error, NotADirectoryError):
        return SourceError(f"{called} is not a directory; 'pipegrid put' alone stores a file")
    return SourceError(f"cannot read {called}: {error.strerror}")


# Records of files and directories that earlier runs have stored, and that need not be sent again.


class KnownObject(NamedTuple):
    """
    An unchanged file or directory that was stored before.

    Attributes:
        cap: the cap of the file; for a directory, of the file with its bytes.
        due: whether the object must be checked before it counts as stored.
        extended: for a file, its extended metadata as stored (``extended_metadata``); None: unknown.
    """

    cap: ChkCap | LitCap
    due: bool = False
    extended: dict[str, Any] | None = None


class KnownObjects:
    """
    Records of what earlier runs have stored; this base class has none. ``file`` is called in a thread, one
    call at a time.
    """

    def file(self, path: str, found: os.stat_result) -> KnownObject | None:
        """Return the record of a regular file; None if the file has changed or is not recorded."""
        return None

    def directory(self, packed: bytes) -> KnownObject | None:
        """Return the record of a directory with exactly these bytes; None if it is not recorded."""
        return None

    def sending(self, cap: ChkCap) -> None:
        """Record that the object of this cap is about to be stored."""

    def file_stored(self, met: FileMet, cap: ChkCap | LitCap) -> None:
        """Record that a file was read and stored."""

    def extended_read(self, met: FileMet) -> None:
        """Record the extended metadata of a known file, which its record lacked."""

    def directory_stored(self, packed: bytes, cap: ChkCap) -> None:
        """Record that a directory with exactly these bytes is stored under this cap."""

    def checked(self, cap: ChkCap | LitCap) -> None:
        """Record that the object of this cap was found healthy."""
