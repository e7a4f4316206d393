"""Which unfinished uploads have their files open: so many at most, the longest unused are closed first."""

from __future__ import annotations

import threading
from collections import OrderedDict

from pipegrid.storage.paths import ShareKey
from pipegrid.storage.uploads.upload import ShareUpload


class OpenFiles:
    """
    The uploads that may be closed.

    Complete ones stay open until they are published; how many wait for that is bounded elsewhere.

    Args:
        most: that may be open.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # The longest unused first.
        self._uploads: OrderedDict[ShareKey, ShareUpload] = OrderedDict()
        self._lock = threading.Lock()  # nothing is waited for under it

    def used(self, upload: ShareUpload) -> None:
        """It has been written to, and is open; another one may be closed for it."""
        key = (upload.storage_index, upload.share_number)
        if upload.complete:
            self.discard(key)
            return
        with self._lock:
            self._uploads[key] = upload
            self._uploads.move_to_end(key)
            excess = len(self._uploads) - self._most
            if excess <= 0:
                return
            candidates = list(self._uploads.items())
        for key, other in candidates:
            if excess > 0 and other is not upload and other.suspend():
                excess -= 1
                with self._lock:
                    if not other.is_open:
                        self._uploads.pop(key, None)

    def discard(self, key: ShareKey) -> None:
        """It has ended, or must not be closed any more."""
        with self._lock:
            self._uploads.pop(key, None)

    def clear(self) -> None:
        """Forget them all, without closing any."""
        with self._lock:
            self._uploads.clear()
