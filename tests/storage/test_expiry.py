"""When leases count as run out, and which shares go with them."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.storage.mutable import slot_file as mutable_containers
from pipegrid.storage.share_file import LEASE_DURATION_S, Expiry
from tests.storage.support import NOW, SECRETS, SI, StoreTestCase

DAY_S = 86400


class ThresholdTests(SynchronousTestCase):
    """The time with which the expiry of leases is compared."""

    def test_as_leases_say(self) -> None:
        """By default a lease lives as long as it says: 31 days from its renewal."""
        self.assertEqual(Expiry().threshold(NOW), NOW)

    def test_another_duration(self) -> None:
        """A lease renewed 60 days and a second ago has run out after 60 days, one renewed later has not."""
        threshold = Expiry(60 * DAY_S).threshold(NOW)
        renewed = NOW - 60 * DAY_S
        self.assertLess(renewed - 1 + LEASE_DURATION_S, threshold)
        self.assertGreaterEqual(renewed + LEASE_DURATION_S, threshold)

    def test_since_a_day(self) -> None:
        """A lease has run out if it was renewed before the day, however late it is now."""
        for now in (NOW, NOW + 1000 * DAY_S):
            threshold = Expiry(renewed_since=NOW).threshold(now)
            self.assertLess(NOW - 1 + LEASE_DURATION_S, threshold)
            self.assertGreaterEqual(NOW + LEASE_DURATION_S, threshold)


class CollectionTests(StoreTestCase):
    """A share of each kind, leased at the same time."""

    def setUp(self) -> None:
        super().setUp()
        self.put(0, b"immutable")
        path = self.final(1)
        lease = mutable_containers.make_lease(2, SECRETS.lease, bytes(20), NOW)
        empty = bytearray(mutable_containers.pack_empty(bytes(20), bytes(32)))
        at = mutable_containers.LEASES_OFFSET
        empty[at : at + mutable_containers.LEASE_BYTES] = lease.pack()
        path.write_bytes(empty)

    def left(self, expiry: Expiry, after_days: float) -> list[str]:
        """Return which shares outlive a collection so many days later."""
        self.now = NOW + after_days * DAY_S
        self.store.collect_garbage(expiry)
        directory = self.final(0).parent
        return sorted(path.name for path in directory.glob("*"))

    def test_a_longer_life(self) -> None:
        """Leases that live 60 days keep shares for 60 days."""
        expiry = Expiry(60 * DAY_S)
        self.assertEqual(self.left(expiry, 59.9), ["0", "1"])
        self.assertEqual(self.left(expiry, 60.1), [])

    def test_a_shorter_life(self) -> None:
        """Leases that live a day do not keep them for two."""
        self.assertEqual(self.left(Expiry(DAY_S), 0.9), ["0", "1"])
        self.assertEqual(self.left(Expiry(DAY_S), 1.1), [])

    def test_since_a_day(self) -> None:
        """What was leased since the day stays for ever, and all else goes at once."""
        self.assertEqual(self.left(Expiry(renewed_since=NOW), 10_000), ["0", "1"])
        self.assertEqual(self.left(Expiry(renewed_since=NOW + 1), 0), [])

    def test_one_kind(self) -> None:
        """Only shares of the kinds that are asked for go."""
        self.assertEqual(self.left(Expiry(immutable=False, mutable=False), 1000), ["0", "1"])
        self.assertEqual(self.left(Expiry(immutable=False), 1000), ["0"])
        self.assertEqual(self.left(Expiry(mutable=False), 1000), [])
        self.assertEqual(self.store.list_shares(SI), frozenset())

    def test_only_immutable_ones(self) -> None:
        """Mutable ones stay."""
        self.assertEqual(self.left(Expiry(mutable=False), 1000), ["1"])
