"""
Files that a gateway writes in its directory, as a Tahoe-LAFS node does, for other programs.

    node.url                 its address; replaced at every start
    running.process          see ``disk.directory_claim``
    private/api_auth_token   a new secret at every start
"""

from __future__ import annotations

import os
from base64 import urlsafe_b64encode
from pathlib import Path

from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.directory_claim import DirectoryClaim
from pipegrid.errors import UsageError

URL_NAME = "node.url"
TOKEN_NAME = "private/api_auth_token"
TOKEN_BYTES = 32


class NodeFiles:
    """
    The files of one gateway in one directory.

    Attributes:
        token: the content of ``private/api_auth_token``; empty before ``claim``.
    """

    def __init__(self, directory: Path) -> None:
        self.token = ""
        self._directory = directory
        self._claim: DirectoryClaim | None = None

    def claim(self) -> None:
        """
        Take the directory for this process, and create a token.

        Raises:
            UsageError: another gateway, or a Tahoe-LAFS node, uses it; or it cannot be written to.
        """
        try:
            self._claim = DirectoryClaim(self._directory)
            self.token = urlsafe_b64encode(os.urandom(TOKEN_BYTES)).decode("ascii")
            self._write(TOKEN_NAME, self.token, 0o600)
        except OSError as error:
            self.release()
            raise UsageError(
                f"cannot write in {self._directory}: {error.strerror}; a gateway writes its address there"
            ) from error

    def announce(self, url: str) -> None:
        """
        Write the address, once the port is open.

        Raises:
            UsageError: it cannot be written.
        """
        try:
            self._write(URL_NAME, url, 0o644)
        except OSError as error:
            raise UsageError(
                f"cannot write {self._directory / URL_NAME}: {error.strerror}; other programs look there for "
                "the gateway"
            ) from error

    def release(self) -> None:
        """Release the directory; ``node.url`` stays, as with a Tahoe-LAFS node."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    def _write(self, name: str, text: str, mode: int) -> None:
        data = f"{text}\n".encode("ascii")
        replace_file(self._directory / name, data, mode=mode, durable=False)
