"""Lease secrets and write enablers are the recorded ones; upload secrets are stable and distinct."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import hashes
from pipegrid.errors import UsageError
from tests import vectors

CASES = [
    {name: bytes.fromhex(value) for name, value in case.items()}
    for case in vectors.load("primitives")["lease_and_mutable_secrets"]
]


class LeasesTests(SynchronousTestCase):
    """Secrets for servers."""

    def test_recorded_lease_secrets(self) -> None:
        """Every step from the client's secret to the server's is as recorded."""
        for case in CASES:
            client = hashes.ClientSecrets(case["lease_secret"])
            of_file = client.for_file(case["storage_index"])
            self.assertEqual(of_file.renewal, case["file_renewal_secret"])
            self.assertEqual(of_file.cancel, case["file_cancel_secret"])
            secrets = of_file.for_server(case["tubid"])
            self.assertEqual(secrets.renew, case["bucket_renewal_secret"])
            self.assertEqual(secrets.cancel, case["bucket_cancel_secret"])
        self.assertEqual(len(CASES), 3)

    def test_recorded_write_enablers(self) -> None:
        """Write enablers agree with those of every other writer."""
        for case in CASES:
            enabler = hashes.write_enabler(case["writekey"], case["tubid"])
            self.assertEqual(enabler, case["write_enabler"])

    def test_upload_secret_is_the_documented_chain(self) -> None:
        """The upload secret must never change, or uploads that were cut off cannot be resumed."""
        tag = hashes.Tag(b"pipegrid_upload_secret_v1")
        lease_secret, index, seed = bytes(range(32)), bytes(range(16)), bytes(range(20))
        client = tag.hash(lease_secret)
        expected = tag.hash_pair(tag.hash_pair(client, index), seed)
        secrets = hashes.ClientSecrets(lease_secret).for_file(index).for_server(seed)
        self.assertEqual(secrets.upload, expected)
        self.assertEqual(
            expected.hex(), "9238efd4356649baffe93d5fdc68c337d51b5c42a88f0a053603d5b69edbdd88"
        )

    def test_every_input_matters(self) -> None:
        """Another client, file or server has other secrets, and no two secrets of one are the same."""
        seen: set[bytes] = set()
        for lease_secret in (b"a" * 32, b"b" * 32):
            client = hashes.ClientSecrets(lease_secret)
            for index in (b"i" * 16, b"j" * 16):
                for seed in (b"s" * 20, b"t" * 20):
                    secrets = client.for_file(index).for_server(seed)
                    self.assertEqual(secrets, client.for_file(index).for_server(seed))
                    seen |= {secrets.renew, secrets.cancel, secrets.upload}
        self.assertEqual(len(seen), 24)
        self.assertEqual({len(secret) for secret in seen}, {32})

    def test_refuses_a_damaged_lease_secret(self) -> None:
        """A secret that is cut short would be a weak one."""
        for secret in (b"", b"x" * 31, b"x" * 33):
            self.assertRaises(UsageError, hashes.ClientSecrets, secret)

    def test_secrets_stay_out_of_sight(self) -> None:
        """No repr shows a secret."""
        of_file = hashes.ClientSecrets(b"a" * 32).for_file(b"i" * 16)
        secrets = of_file.for_server(b"s" * 20)
        for secret in (of_file.upload, of_file.renewal, secrets.renew, secrets.upload):
            self.assertNotIn(repr(secret), repr(of_file) + repr(secrets))
