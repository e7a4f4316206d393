"""The SFTP server of a grid, and the factory for its endpoint."""

from __future__ import annotations

from pathlib import Path

import attrs
from twisted.conch.ssh.keys import Key
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from pipegrid.disk.private_files import PRIVATE_DIRECTORY, make_directory
from pipegrid.errors import UsageError
from pipegrid.gateway.gateway_settings import SftpSettings
from pipegrid.gateway.sftp.accounts import Account, Accounts
from pipegrid.gateway.sftp.file_writer import TemporarySpace, WrittenFiles
from pipegrid.gateway.sftp.sftp_session import SftpSession
from pipegrid.gateway.sftp.sftp_tree import AccountTree
from pipegrid.gateway.sftp.ssh_server import SftpChannel, SftpFactory, host_key
from pipegrid.reactor.deferreds import timeout_or
from pipegrid.tree.directory_views import DirectoryViews
from pipegrid.tree.read_ahead import ReadSpace
from pipegrid.tree.tree_grid import Grid

_UNKNOWN_SPACE_BYTES = 1 << 50
_SPACE_S = 30.0


@attrs.frozen
class SftpBounds:
    """
    Bounds of the SFTP server.

    Attributes:
        directory: of files that are being written; None: the system's directory of temporary files.
        temporary_bytes: of all of them.
    """

    directory: Path | None = None
    temporary_bytes: int = 64 << 30


class FreeSpaceMeter:
    """How much more a grid can store, queried from its servers at intervals."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._known = _UNKNOWN_SPACE_BYTES
        self._asked_at: float | None = None

    def __call__(self) -> Deferred[int]:
        """Fire with bytes of files, as the servers report them; see ``sftp_session.SpaceMeter``."""
        return Deferred.fromCoroutine(self._measure())

    async def _measure(self) -> int:
        now = self._grid.clock.seconds()
        if self._asked_at is None or now - self._asked_at > _SPACE_S:
            self._asked_at = now
            found = [
                each.available_bytes
                for each in await self._grid.status()
                if each.reachable and not each.no_uploads and each.available_bytes is not None
            ]
            if found:
                params = self._grid.config.params
                # Storage directories of one machine share its disk.
                total = min(found) if self._grid.config.is_on_this_machine else sum(found)
                self._known = total * params.required_shares // params.total_shares
        return self._known


class SftpServer:
    """
    The SFTP server of a grid.

    Args:
        grid: an open grid; it stays open.
        accounts: who may log in, and to which directory.
        key: the server's; see ``ssh_server.host_key``.

    Attributes:
        factory: for the endpoint.
    """

    _log = Logger()

    def __init__(
        self,
        grid: Grid,
        accounts: Accounts,
        key: Key,
        bounds: SftpBounds | None = None,
    ) -> None:
        bounds = bounds or SftpBounds()
        self._grid = grid
        self._views = DirectoryViews(grid)
        space = TemporarySpace(bounds.directory, bounds.temporary_bytes)
        self._files = WrittenFiles(grid, self._views, space)
        self._reading = ReadSpace()
        self._free_space = FreeSpaceMeter(grid)
        self.factory = SftpFactory(grid.clock, accounts, key, self._session)

    def _session(self, channel: SftpChannel, account: Account) -> SftpSession:
        tree = AccountTree(self._grid, account.cap, self._views, self._files)
        return SftpSession(channel, tree, self._reading, self._free_space)

    async def stop(self, ending_s: float) -> None:
        """
        Wait until the files that clients have closed are stored, then disconnect the clients.

        Args:
            ending_s: the longest wait; files not stored by then are lost, which is logged.
        """
        await timeout_or(self._files.stored(), ending_s, self._grid.clock)
        left = self._files.count
        if left:
            self._log.warn(
                "{count} files that SFTP clients were writing are not stored, since the gateway stops",
                count=left,
            )
        self.factory.disconnect_all()


def open_sftp(grid: Grid, settings: SftpSettings, directory: Path) -> SftpServer:
    """
    Return the SFTP server of a gateway.

    Args:
        directory: of files that are being written; created if missing.

    Raises:
        UsageError: the accounts or the key cannot be read or created.
    """
    accounts = Accounts(settings.accounts)
    key = host_key(settings.private_key, settings.public_key)
    try:
        make_directory(directory, PRIVATE_DIRECTORY)
    except OSError as error:
        raise UsageError(
            f"cannot make {directory} for temporary files ({error.strerror})"
        ) from error
    return SftpServer(grid, accounts, key, SftpBounds(directory))
