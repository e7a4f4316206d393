"""Mutable shares of a storage directory: reading, and the atomic read-test-write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pipegrid.wire.messages import LeaseSecrets, ShareChange, SlotResult, SlotSecrets


class Slots:
    """
    The mutable side of a ``ShareStore``, which has one as ``store.slots``.

    All methods block on the disk. Call them through ``SlotQueue``, which keeps the order and the
    reactor's thread free.

    Attributes:
        node_id: 20 bytes, the server's tub id, noted in every container and lease.
    """

    node_id: bytes

    def testv_and_readv_and_writev(
        self,
        storage_index: bytes,
        secrets: SlotSecrets,
        tw_vectors: Mapping[int, ShareChange],
        r_vector: Sequence[tuple[int, int]],
        durable: bool = True,
    ) -> SlotResult:
        """
        Test, read and write the shares of a slot, atomically.

        Args:
            r_vector: ``(offset, size)``, read from every share that there is, before anything is written.
            durable: sync what was written before returning.

        Raises:
            WrongSecret: the write enabler is not that of every share there; ``error.args[0]`` holds the text
                ``The write enabler was recorded by nodeid '<base32>'.``
            UsageError: a share number or a vector that cannot be, a write enabler that is not 32 bytes long
                for a share that is new.
            NoSpace: it would not fit; nothing was changed.
            ServerRefused: the disk failed, a container is damaged, or the answer would be too large.
        """
        raise NotImplementedError

    def readv(
        self,
        storage_index: bytes,
        share_numbers: Collection[int],
        r_vector: Sequence[tuple[int, int]],
    ) -> dict[int, tuple[bytes, ...]]:
        """
        Read from shares of a slot; no share numbers means all. Shares that are not there are left out.

        Raises:
            UsageError, ServerRefused: as above.
        """
        raise NotImplementedError

    def list_shares(self, storage_index: bytes) -> frozenset[int]:
        """Return the numbers of the mutable shares."""
        raise NotImplementedError

    def add_lease(self, storage_index: bytes, secrets: LeaseSecrets) -> bool:
        """Add or renew a lease on all mutable shares; returns whether there are any."""
        raise NotImplementedError
