"""
Makes the shares of a file again from its ciphertext, without its key, as they were at first.

Encoding is deterministic: the same ciphertext and sizes give the same blocks, the same trees and the
same chains. What proves it is the UEB that the file's shares hold: its roots vouch for every byte.

Source: the format reference, sections 2 to 6.
"""

from __future__ import annotations

from pipegrid.core import ueb
from pipegrid.core.caps import ChkVerifierCap
from pipegrid.core.encoder import Encoder
from pipegrid.core.hashes import KEY_BYTES
from pipegrid.core.params import Geometry
from pipegrid.errors import CorruptionError


class Reencoder(Encoder):
    """
    An encoder that is given ciphertext where others are given plaintext; it has no ``cap``.

    Args:
        packed_ueb: the one that the cap names.
    """

    def __init__(self, cap: ChkVerifierCap, packed_ueb: bytes) -> None:
        self._told = ueb.parse(packed_ueb)
        self._packed_ueb = packed_ueb
        geometry = Geometry(
            cap.size, cap.required_shares, cap.total_shares, self._told.segment_bytes
        )
        super().__init__(geometry, bytes(KEY_BYTES))
        self._cipher = None

    def _make_ueb(
        self, crypttext_hash: bytes, crypttext_root_hash: bytes, share_root_hash: bytes
    ) -> bytes:
        """
        Return the UEB as it was, be it with fields that only its writer knows.

        Raises:
            CorruptionError: it is not that of these shares.
        """
        told = self._told
        flat_hash = told.fields.get(b"crypttext_hash", crypttext_hash)
        if (flat_hash, told.crypttext_root_hash, told.share_root_hash) != (
            crypttext_hash,
            crypttext_root_hash,
            share_root_hash,
        ):
            raise CorruptionError(
                "this file was stored damaged, by a faulty or malicious writer: its shares restore it, "
                "but it does not give these shares; store it again from the original"
            )
        return self._packed_ueb
