"""
The secrets that a client derives for each file and server from its lease secret.

Source: the format reference, storage protocols, section 6.
"""

from __future__ import annotations

from typing import NamedTuple

from pipegrid.core.hashes import Tag
from pipegrid.errors import UsageError

LEASE_SECRET_BYTES = 32

_FILE_RENEWAL = Tag(b"allmydata_file_renewal_secret_v1")
_FILE_CANCEL = Tag(b"allmydata_file_cancel_secret_v1")
_SERVER_RENEWAL = Tag(b"allmydata_bucket_renewal_secret_v1")
_SERVER_CANCEL = Tag(b"allmydata_bucket_cancel_secret_v1")
_UPLOAD = Tag(b"pipegrid_upload_secret_v1")
_ENABLER_MASTER = Tag(b"allmydata_mutable_writekey_to_write_enabler_master_v1")
_ENABLER = Tag(b"allmydata_mutable_write_enabler_master_and_nodeid_to_write_enabler_v1")


class ServerSecrets(NamedTuple):
    """The three secrets that one server gets for one file, 32 bytes each."""

    renew: bytes
    cancel: bytes
    upload: bytes

    def __repr__(self) -> str:
        """Return its name alone, since logs may contain it."""
        return "ServerSecrets(...)"


class FileSecrets(NamedTuple):
    """The secrets of one file before they are bound to a server: three hashes of 32 bytes."""

    renewal: bytes
    cancel: bytes
    upload: bytes

    def __repr__(self) -> str:
        """Return its name alone, since logs may contain it."""
        return "FileSecrets(...)"

    def for_server(self, lease_seed: bytes) -> ServerSecrets:
        """
        Return the secrets of this file on one server.

        Args:
            lease_seed: 20 bytes, the server's tub id; over HTTPS as well.
        """
        return ServerSecrets(
            renew=_SERVER_RENEWAL.hash_pair(self.renewal, lease_seed),
            cancel=_SERVER_CANCEL.hash_pair(self.cancel, lease_seed),
            upload=_UPLOAD.hash_pair(self.upload, lease_seed),
        )


class ClientSecrets:
    """
    Derives all secrets of one client, in three steps: client, file, server. No server learns another one's
    secrets.

    The upload secret is PipeGrid's own. Other clients draw a random one for every attempt; a derived one
    lets any process with the same lease secret, and no other, resume an interrupted upload.

    Args:
        lease_secret: the 32 bytes that a node directory keeps in ``private/secret``.

    Raises:
        UsageError: the secret has another length.
    """

    __slots__ = ("_cancel", "_renewal", "_upload")

    def __init__(self, lease_secret: bytes) -> None:
        if len(lease_secret) != LEASE_SECRET_BYTES:
            raise UsageError(
                f"the lease secret has {len(lease_secret)} bytes instead of {LEASE_SECRET_BYTES}; "
                "restore private/secret, or remove it to get a new one"
            )
        # Only in this step is the secret the tag and the constant the value.
        secret_tag = Tag(lease_secret)
        self._renewal = secret_tag.hash(b"allmydata_client_renewal_secret_v1")
        self._cancel = secret_tag.hash(b"allmydata_client_cancel_secret_v1")
        self._upload = _UPLOAD.hash(lease_secret)

    def for_file(self, storage_index: bytes) -> FileSecrets:
        """Return the secrets of one file, to be bound to servers with ``for_server``."""
        return FileSecrets(
            renewal=_FILE_RENEWAL.hash_pair(self._renewal, storage_index),
            cancel=_FILE_CANCEL.hash_pair(self._cancel, storage_index),
            upload=_UPLOAD.hash_pair(self._upload, storage_index),
        )


def write_enabler(writekey: bytes, lease_seed: bytes) -> bytes:
    """Return the 32-byte write enabler of a mutable file on one server, for the holder of its write key."""
    return _ENABLER.hash_pair(_ENABLER_MASTER.hash(writekey), lease_seed)
