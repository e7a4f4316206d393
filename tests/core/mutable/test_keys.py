"""Keys: what follows from a key pair, and what is refused of what servers and strangers hand over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from twisted.trial.unittest import SynchronousTestCase

import pipegrid
from pipegrid.core.caps import MutableCap, parse_cap
from pipegrid.core.mutable import keys
from pipegrid.core.mutable.keys import (
    generate,
    load_signing_key,
    load_verifying_key,
    open_signing_key,
)
from pipegrid.core.mutable.versions import Format
from pipegrid.errors import CorruptionError, UsageError
from tests import vectors
from tests.core.mutable.support import key

PKCS8 = (Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
SPKI = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


class KeyTests(SynchronousTestCase):
    """Key pairs of files."""

    def test_recorded_keys(self) -> None:
        """Everything that follows from a recorded private key is as recorded."""
        for case in vectors.load("mutable")["cases"]:
            loaded = load_signing_key(bytes.fromhex(case["private_key_pkcs8_der"]))
            self.assertEqual(loaded.public_der.hex(), case["public_key_spki_der"])
            for name in ("writekey", "readkey", "fingerprint"):
                self.assertEqual(getattr(loaded, name).hex(), case[name])
            cap = loaded.cap(Format[case["format"].upper()])
            self.assertEqual(str(cap), case["cap"])
            self.assertEqual(str(cap.readonly()), case["readcap"])
            self.assertEqual(str(cap.verifier()), case["verifycap"])
            self.assertEqual(cap.storage_index, loaded.storage_index)
            self.assertEqual(Format.of(cap), Format[case["format"].upper()])
        for case in vectors.load("trees")["mutable_directories"]:
            loaded = load_signing_key(bytes.fromhex(case["private_key_pkcs8_der"]))
            directory = parse_cap(case["rw_cap"])
            self.assertEqual(loaded.cap(Format[case["format"]]), directory.file)  # type: ignore[union-attr]

    def test_a_new_key(self) -> None:
        """A new key pair is of the kind that is accepted, and is found again in what shares hold."""
        made = generate()
        cap = made.cap(Format.MDMF)
        self.assertTrue(1214 <= len(made.der) <= 1220)
        opened = open_signing_key(made.encrypted, cap, 0)
        self.assertEqual((opened.der, opened.public_der), (made.der, made.public_der))
        verifying = load_verifying_key(made.public_der, cap, 0)
        signature = opened.sign(b"version")
        self.assertEqual(len(signature), keys.SIGNATURE_BYTES)
        self.assertTrue(verifying.is_signature(signature, b"version"))
        self.assertFalse(verifying.is_signature(signature, b"Version"))
        self.assertFalse(verifying.is_signature(signature[:-1], b"version"))
        self.assertFalse(verifying.is_signature(b"", b"version"))

    def test_old_keys(self) -> None:
        """Keys with the exponent 17, whose public key is two bytes shorter, are read and sign."""
        loaded = load_signing_key(
            bytes.fromhex(vectors.load("exponent17")["private_key_pkcs8_der"])
        )
        cap = loaded.cap(Format.SDMF)
        self.assertEqual(len(loaded.public_der), 292)
        opened = open_signing_key(loaded.encrypted, cap, 0)
        verifying = load_verifying_key(loaded.public_der, cap, 0)
        self.assertTrue(verifying.is_signature(opened.sign(b"x"), b"x"))

    def test_refuses_other_keys(self) -> None:
        """Keys of another size, exponent or kind are refused, and so is what is no key."""
        others = [
            rsa.generate_private_key(65537, 1024).private_bytes(*PKCS8),
            rsa.generate_private_key(3, 2048).private_bytes(*PKCS8),
            ed25519.Ed25519PrivateKey.generate().private_bytes(*PKCS8),
            key().der[:-1],
            key().der + b"\0",
            bytes(1216),
            b"",
            key().der * 1000,
        ]
        for der in others:
            with self.assertRaises(UsageError):
                load_signing_key(der)
        for index in (
            6,
            20,
            *range(0, len(key().der), 13),
        ):  # version and algorithm are not the key's own
            damaged = bytearray(key().der)
            damaged[index] ^= 1
            with self.assertRaises(UsageError, msg=str(index)):
                load_signing_key(bytes(damaged))

    def test_a_proven_key_is_checked_too(self) -> None:
        """Numbers that do not belong together are found even if the test for primes is left out."""
        for index in (
            6,
            20,
            *range(0, len(key().der), 13),
        ):  # version and algorithm are not the key's own
            damaged = bytearray(key().der)
            damaged[index] ^= 1
            with self.assertRaises(UsageError, msg=str(index)):
                load_signing_key(bytes(damaged), proven=True)

    def test_only_the_private_key_of_the_cap_is_opened(self) -> None:
        """A damaged private key, and one of another cap, is corruption that names the share."""
        cap = key().cap(Format.SDMF)
        damaged = bytearray(key().encrypted)
        damaged[700] ^= 4
        for encrypted in (bytes(damaged), key(1).encrypted, b"", key().encrypted * 2):
            error = self.assertRaises(CorruptionError, open_signing_key, encrypted, cap, 5)
            self.assertEqual(error.share_number, 5)
            self.assertIn("share 5", str(error))

    def test_a_writekey_that_names_another_pair(self) -> None:
        """Whoever makes a cap of two halves that do not fit is not trusted."""
        liar = MutableCap("SSK", "write", key().writekey, key(1).fingerprint)
        error = self.assertRaises(CorruptionError, open_signing_key, key().encrypted, liar, 1)
        self.assertIn("do not trust", str(error))

    def test_only_the_public_key_of_the_cap_is_used(self) -> None:
        """Another file's key is corruption; one of another size is refused although the cap names it."""
        cap = key().cap(Format.SDMF)
        flipped = bytearray(key().public_der)
        flipped[100] ^= 1
        for der in (key(1).public_der, bytes(flipped), b"", key().public_der[:-1], bytes(294)):
            error = self.assertRaises(CorruptionError, load_verifying_key, der, cap, 2)
            self.assertEqual(error.share_number, 2)
        for other in (
            rsa.generate_private_key(65537, 1024).public_key().public_bytes(*SPKI),
            rsa.generate_private_key(3, 2048).public_key().public_bytes(*SPKI),
            key().public_der[:33] + b"\x7f" + key().public_der[34:],
            bytes(294),
            key().public_der[:280] + bytes(14),
        ):
            lying = MutableCap("SSK", "read", bytes(16), keys.fingerprint(other))
            self.assertRaises(CorruptionError, load_verifying_key, other, lying, 2)

    def test_an_even_modulus(self) -> None:
        """A modulus that no key can have, though the cap names it, verifies nothing."""
        der = bytearray(key().public_der)
        der[-6] &= 0xFE
        cap = MutableCap("SSK", "read", bytes(16), keys.fingerprint(bytes(der)))
        try:
            loaded = load_verifying_key(bytes(der), cap, 2)
        except CorruptionError:
            return
        self.assertFalse(loaded.is_signature(bytes(256), b"x"))

    def test_commands_that_need_no_key_do_not_wait_for_rsa(self) -> None:
        """Importing what reads shares imports no asymmetric cryptography."""
        code = (
            "import sys, pipegrid.core.mutable.mutable_share, pipegrid.core.mutable.range_update, "
            "pipegrid.core.mutable.directory_content_edits; "
            "print([m for m in sys.modules if 'asymmetric' in m or 'serialization' in m])"
        )
        source = str(Path(pipegrid.__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": source}
        told = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, env=environment
        )
        self.assertEqual(told.stdout.strip(), b"[]", told.stderr)
