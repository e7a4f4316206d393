"""
The shares of one file as all servers know them, whichever share it is and wherever it goes.
"""

from __future__ import annotations

import attrs

from pipegrid.core.leases import FileSecrets
from pipegrid.transfer.peers import Peer, upload_secrets
from pipegrid.wire.messages import UploadSecrets


@attrs.frozen(eq=False)
class ShareSet:
    """
    What the shares of a file have in common.

    Attributes:
        storage_index: 16 bytes; names them on servers, and decides the ring.
        share_bytes: the length of each.
        secrets: from which those for each server derive.
    """

    storage_index: bytes
    share_bytes: int
    secrets: FileSecrets = attrs.field(repr=False)

    def secrets_for(self, peer: Peer) -> UploadSecrets:
        """Return the secrets of this file on this server."""
        return upload_secrets(self.secrets, peer.identity)
