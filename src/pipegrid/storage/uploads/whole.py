"""
A share that came whole, together with the question for room: there is nothing of it to go on with.

Most small shares come so (``wire.gbs_bundles``), and what unfinished uploads need would cost them half of
their time: a name in ``incoming``, a lock, a look whether the name still is theirs. So such a share has no
name before it is published (``disk.unnamed``). If this process dies, or its client goes and the disk fails,
nothing of it is left.

Another process may upload the same share meanwhile, as neither sees the other. Whoever is later finds the
name taken, leaves the share as it is, leases and all, and tells its client that the upload is gone.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from itertools import islice

from pipegrid.core.spans import Range, Spans
from pipegrid.disk import files as disk
from pipegrid.disk.private import PRIVATE_FILE
from pipegrid.disk.unnamed import can_name, open_unnamed
from pipegrid.storage import containers
from pipegrid.storage.paths import Paths, ShareKey
from pipegrid.storage.uploads import files as incoming
from pipegrid.storage.uploads import note as sidecar
from pipegrid.storage.uploads.standing import NOBODY, Client
from pipegrid.storage.uploads.upload import ShareUpload, UploadKeeper

_FORBIDDEN = frozenset(
    {
        *(errno.EACCES, errno.EINVAL, errno.EMLINK, errno.ENOENT, errno.ENOSYS, errno.EOPNOTSUPP),
        *(errno.EPERM, errno.EXDEV),
    }
)
"""What is wrong with naming such files at all, and not with the disk at this moment."""

MAX_LEFT = 4096
"""Names of unfinished uploads that are kept in mind; if there are more, each share's is looked for."""


class WholeShare(ShareUpload):
    """
    A complete share without a name; made by ``UnfinishedUploads`` alone.

    Args:
        fd: of its file.
        clock, keeper: see ``WholeShares``.
        on_forbidden: called if its file cannot get a name, for a reason that others' would have as well.
    """

    # As an upload has them that nobody has taken up: each assignment costs what thousands a second can feel.
    client: Client = NOBODY
    left_behind = False
    unsent_bytes = 0
    resumed = False
    promised_bytes = 0
    gone = False
    stored = False
    new_index = True
    _incoming = ""
    _boot_id = b""
    _fresh_lease = None
    _file: tuple[int, int] | None = None
    _noted: tuple[Range, ...] | None = None
    _came_before = 0
    _beginning = False

    def __init__(
        self,
        key: ShareKey,
        share_bytes: int,
        secret_hash: bytes,
        fd: int,
        final_path: str,
        clock: Callable[[], float],
        keeper: UploadKeeper,
        on_forbidden: Callable[[], None],
    ) -> None:
        self.storage_index, self.share_number = key
        self.share_bytes = share_bytes
        self.secret_hash = secret_hash
        self.last_write = self.began = clock()
        self.opened = next(self._openings)
        self._fd = fd
        self._final = final_path
        self._clock = clock
        self._keeper = keeper
        self._on_forbidden = on_forbidden
        self._received = Spans.up_to(share_bytes)
        self._lock = threading.RLock()

    def checkpoint(self) -> None:
        """Note nothing: nobody could go on with a file that has no name."""

    def suspend(self, unpublished: bool = False) -> bool:
        """Stay open: closed, it would be gone."""
        return False

    def _place(self) -> tuple[str, ...]:
        assert self._fd is not None, "its file is open until it is gone"
        try:
            return incoming.name(self._fd, self._final, self.new_index)
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno in _FORBIDDEN:
                self._on_forbidden()
            raise

    def _remove(self, fd: int) -> None:
        """Do nothing: it goes when it is closed."""


class WholeShares:
    """
    Makes them, of indexes that have no share yet.

    Args:
        paths: where shares are.
        clock: seconds since 1970.
        keeper: told what becomes of each share.
    """

    def __init__(self, paths: Paths, clock: Callable[[], float], keeper: UploadKeeper) -> None:
        self._paths = paths
        self._clock = clock
        self._keeper = keeper
        # Whether files can do without names; None: nobody has tried.
        self._possible: bool | None = None
        # Unfinished uploads of other processes; None: too many to keep in mind.
        self._left: frozenset[str] | None = frozenset()

    def make(
        self, key: ShareKey, data: bytes, upload_secret: bytes, make_lease: Callable[[], bytes]
    ) -> WholeShare | None:
        """
        Write a share to its file; None if it has to be uploaded step by step.

        Its index may have a directory, and perhaps a share; or the disk refuses, which the first step tells.
        """
        paths = self._paths
        if self._possible is False or os.access(paths.directory(key[0]), os.F_OK):
            return None
        try:
            if self._possible is None:
                self._look_around()
                if not self._possible:
                    return None
            if self._left is None or self._left:
                name = paths.unfinished(*key)
                if os.path.lexists(name) if self._left is None else name in self._left:
                    return None
            fd = open_unnamed(paths.incoming, PRIVATE_FILE)
        except OSError:
            return None
        try:
            header = containers.pack_header(len(data), 1)
            disk.write_all_pieces(fd, [header, data, make_lease()], 0)
        except OSError:
            os.close(fd)
            return None
        return WholeShare(
            key,
            len(data),
            sidecar.hash_secret(upload_secret),
            fd,
            paths.final(*key),
            self._clock,
            self._keeper,
            self._forbid,
        )

    def _forbid(self) -> None:
        """From now on every share is uploaded step by step."""
        self._possible = False

    def _look_around(self) -> None:
        """
        Find out what is possible, and what is unfinished: that is gone on with, or begun anew in its file.

        What other processes leave later stays there for the next one, or for housekeeping.
        """
        directory = self._paths.incoming
        self._possible = can_name(directory)
        with os.scandir(directory) as entries:
            names = [entry.path for entry in islice(entries, MAX_LEFT + 1)]
        self._left = None if len(names) > MAX_LEFT else frozenset(names)
