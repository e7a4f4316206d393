"""The beginning of a mount, with a FUSE that only calls back."""

from __future__ import annotations

import errno
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, fail
from twisted.trial.unittest import TestCase

from pipegrid.core.caps import DirectoryCap, LitCap
from tests.mount.test_fuse_operations import FilesGrid
from tests.scratch import scratch_path

try:
    import mfusepy

    from pipegrid.mount.mount_service import Mount, MountSettings, directory_root
except (ImportError, OSError, AttributeError) as error:
    NO_LIBRARY: str | None = f"FUSE's library cannot be loaded: {error}"
else:
    NO_LIBRARY = None


class BusySystem:
    """Workers of a system that gives no more threads."""

    def run_blocking(self, *_: object) -> Deferred[None]:
        """Refuse, as ``BlockingCalls`` does."""
        return fail(OSError(errno.EAGAIN, "it takes a thread, and the system gives no more"))


class StartTests(TestCase):
    skip = NO_LIBRARY

    async def test_no_thread_for_a_setting(self) -> None:
        """The tree is mounted all the same: without it, the kernel reads less far ahead."""

        def serve(operations: Any, _directory: str, **_: object) -> None:
            operations.init("/")

        self.patch(mfusepy, "FUSE", serve)
        grid: Any = FilesGrid()
        grid.workers = BusySystem()
        directory = scratch_path(self)
        settings = MountSettings(str(directory), directory, 0)
        root = directory_root(DirectoryCap(LitCap(b"")))
        mount = Mount(reactor, grid, root, settings, lambda _: None)
        await mount.start()
        await mount.wait()
        self.assertTrue(await mount.stop())
