"""
The keys of a mutable file: an RSA key pair, and the keys and hashes derived from it.

Source: Tahoe-LAFS's ``mutable.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.core.caps import MutableCap
from pipegrid.core.hashes import KEY_BYTES, Tag
from pipegrid.core.mutable.versions import Format
from pipegrid.core.stream_cipher import applied
from pipegrid.errors import CorruptionError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.padding import PSS
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
    from cryptography.hazmat.primitives.hashes import SHA256

KEY_BITS = 2048
SIGNATURE_BYTES = KEY_BITS // 8
_SIGNATURE_SALT_BYTES = 32
_EXPONENT = 65537

PUBLIC_KEY_BYTES = (292, 294)
"""Possible lengths of an RSA-2048 public key in DER; exponent 17, used before 2019, takes two bytes fewer."""

MAX_PRIVATE_KEY_BYTES = 1280
"""PKCS#8 takes 1214 to 1220 bytes for RSA-2048; longer keys are not read."""

MIN_PRIVATE_KEY_BYTES = 1024

# The start of any RSA key in PKCS#8, after the four bytes of tag and length: a version, and the algorithm.
_PKCS8_RSA = bytes.fromhex("020100300d06092a864886f70d0101010500")

# For each of the two exponents in use, the SubjectPublicKeyInfo of RSA-2048 keys differs only in the modulus,
# so key size and exponent are checked by comparing bytes.
_RSA = bytes.fromhex("300d06092a864886f70d0101010500")
_PUBLIC_SHAPES = {
    294: (
        bytes.fromhex("30820122") + _RSA + bytes.fromhex("0382010f003082010a0282010100"),
        bytes.fromhex("0203010001"),
    ),
    292: (
        bytes.fromhex("30820120") + _RSA + bytes.fromhex("0382010d00308201080282010100"),
        bytes.fromhex("020111"),
    ),
}

_WRITEKEY = Tag(b"allmydata_mutable_privkey_to_writekey_v1")
_FINGERPRINT = Tag(b"allmydata_mutable_pubkey_to_fingerprint_v1")
_DATAKEY = Tag(b"allmydata_mutable_readkey_to_datakey_v1")


def data_key(salt: bytes, readkey: bytes) -> bytes:
    """Return the 16-byte encryption key of the segment (SDMF: of the version) with this salt."""
    return _DATAKEY.hash_pair(salt, readkey)[:KEY_BYTES]


def fingerprint(public_der: bytes) -> bytes:
    """Return the 32-byte hash of a public key; every cap of the key's file contains this hash."""
    return _FINGERPRINT.hash(public_der)


class VerifyingKey:
    """The public key of one file, which the fingerprint in a cap has verified."""

    __slots__ = ("_key",)

    def __init__(self, key: RSAPublicKey) -> None:
        self._key = key

    def is_signature(self, signature: bytes, signed: bytes) -> bool:
        """Return whether the owner of the private key signed these bytes."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, signed, *_signature_scheme())
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """
    The private key of one file, and the keys and hashes that are derived from it.

    The write key is a hash of the private key, the read key a hash of the write key, and the storage index a
    hash of the read key (``MutableCap`` derives the last two). The fingerprint is a hash of the public key.

    Attributes:
        der: PKCS#8 PrivateKeyInfo, as the file's author made it.
        public_der: SubjectPublicKeyInfo.
        writekey: 16 bytes, the secret of a write cap.
        readkey: 16 bytes.
        storage_index: 16 bytes.
        fingerprint: 32 bytes.
        encrypted: the private key as every share stores it, as long as ``der``.
    """

    __slots__ = (
        "_key",
        "der",
        "encrypted",
        "fingerprint",
        "public_der",
        "readkey",
        "storage_index",
        "writekey",
    )

    def __init__(self, der: bytes, key: RSAPrivateKey) -> None:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        self.der = der
        self._key = key
        self.public_der = key.public_key().public_bytes(
            Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        )
        self.writekey = _writekey(der)
        self.fingerprint = fingerprint(self.public_der)
        self.encrypted = applied(self.writekey, der)
        cap = self.cap(Format.SDMF)
        self.readkey = cap.readonly().secret
        self.storage_index = cap.storage_index

    def cap(self, format: Format) -> MutableCap:
        """Return the write cap of the file that this key belongs to."""
        return MutableCap(format.cap_kind, "write", self.writekey, self.fingerprint)

    def sign(self, signed: bytes) -> bytes:
        """
        Return a signature of 256 bytes, which differs from call to call. This takes about a millisecond.
        """
        return self._key.sign(signed, *_signature_scheme())

    def verifying(self) -> VerifyingKey:
        """Return the public key, which checks signatures."""
        return VerifyingKey(self._key.public_key())


def _signature_scheme() -> tuple[PSS, SHA256]:
    """Return the padding and the hash that signatures use."""
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
    from cryptography.hazmat.primitives.hashes import SHA256

    return PSS(MGF1(SHA256()), _SIGNATURE_SALT_BYTES), SHA256()


def generate() -> SigningKey:
    """
    Return the key pair of a new file. This takes a tenth of a second or more and releases the GIL, so run it
    in a worker thread.
    """
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = rsa.generate_private_key(_EXPONENT, KEY_BITS)
    der = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    return SigningKey(der, key)


def load_signing_key(der: bytes, proven: bool = False) -> SigningKey:
    """
    Return the key pair of an existing file.

    Args:
        der: PKCS#8 PrivateKeyInfo, unencrypted.
        proven: der hashes to a write cap's secret. Then the two factors are not tested for being primes,
            since the test takes 50 ms; everything else is checked.

    Raises:
        UsageError: der is not an RSA key of 2048 bits.
    """
    wrong = UsageError(
        f"this is not a private key of RSA with {KEY_BITS} bits in PKCS#8 form; give another"
    )
    if not MIN_PRIVATE_KEY_BYTES <= len(der) <= MAX_PRIVATE_KEY_BYTES or not _is_whole(der):
        raise wrong
    key = _parse_rsa_key(der, wrong, proven)
    if key.key_size != KEY_BITS or not _is_coherent(key):
        raise wrong
    loaded = SigningKey(der, key)
    if not _has_known_shape(loaded.public_der):
        raise wrong
    return loaded


def import_signing_key(der: bytes) -> SigningKey:
    """
    Return the key pair that a user brings for a new file.

    Args:
        der: an RSA key in PKCS#1 or PKCS#8 form, unencrypted.

    Raises:
        UsageError: der is not an RSA key of 2048 bits.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    wrong = UsageError(
        f"the private key is not the DER form of an RSA key with {KEY_BITS} bits; give another"
    )
    if len(der) > MAX_PRIVATE_KEY_BYTES:
        raise wrong
    key = _parse_rsa_key(der, wrong)
    return load_signing_key(
        key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()), proven=True
    )


def _parse_rsa_key(der: bytes, wrong: UsageError, proven: bool = False) -> RSAPrivateKey:
    """Return an RSA key in any form that the library reads; raise ``wrong`` if der is no RSA key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_der_private_key

    try:
        key = load_der_private_key(der, None, unsafe_skip_rsa_key_validation=proven)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise wrong from None
    if not isinstance(key, RSAPrivateKey):
        raise wrong
    return key


def load_verifying_key(public_der: bytes, cap: MutableCap, share_number: int) -> VerifyingKey:
    """
    Return the public key that a share holds, after comparing it with the cap's fingerprint.

    Raises:
        CorruptionError: the key is another one, or not valid; the error names the share, but no offset.
    """
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    if len(public_der) not in PUBLIC_KEY_BYTES or fingerprint(public_der) != cap.fingerprint:
        raise CorruptionError(
            f"the public key in share {share_number} is not the one that the cap names; "
            "another server may have a good share",
            share_number,
        )
    wrong = CorruptionError(
        f"share {share_number} has the public key that the cap names, but that is not an RSA key with "
        f"{KEY_BITS} bits; do not trust the source of the cap",
        share_number,
    )
    if not _has_known_shape(public_der):
        raise wrong
    try:
        key = load_der_public_key(public_der)
    except ValueError:  # the modulus is even
        raise wrong from None
    assert isinstance(key, RSAPublicKey)
    return VerifyingKey(key)


def open_signing_key(encrypted: bytes, cap: MutableCap, share_number: int) -> SigningKey:
    """
    Return the key pair from the encrypted private key that a share holds.

    Args:
        cap: a write cap.

    Raises:
        CorruptionError: the key does not match the cap's write key or fingerprint; the error names the share.
    """
    assert cap.access == "write", "only a write cap opens the private key"
    der = applied(cap.secret, encrypted)
    if len(der) > MAX_PRIVATE_KEY_BYTES or _writekey(der) != cap.secret:
        raise CorruptionError(
            f"the encrypted private key in share {share_number} is damaged; "
            "another server may have a good share",
            share_number,
        )
    try:
        key = load_signing_key(der, proven=True)
    except UsageError:
        key = None
    if key is None or key.fingerprint != cap.fingerprint or not _can_sign(key):
        raise CorruptionError(
            f"the private key in share {share_number} is not the one of the cap's public key; "
            "do not trust the source of the cap",
            share_number,
        )
    return key


def _writekey(der: bytes) -> bytes:
    return _WRITEKEY.hash(der)[:KEY_BYTES]


def _is_whole(der: bytes) -> bool:
    """
    Return whether these bytes have the start and the length of a private key; old libraries do not check
    this.
    """
    tag, length, rest = der[:2], int.from_bytes(der[2:4], "big"), der[4:]
    return tag == b"\x30\x82" and length == len(rest) and rest.startswith(_PKCS8_RSA)


def _is_coherent(key: RSAPrivateKey) -> bool:
    """
    Return whether the numbers of a private key are consistent, without testing whether p and q are primes.
    """
    numbers = key.private_numbers()
    p, q, d, public = numbers.p, numbers.q, numbers.d, numbers.public_numbers
    return (
        min(p, q) > 2
        and p * q == public.n
        and p % 2 == q % 2 == 1
        and 1 < d < public.n
        and (d * public.e - 1) % (p - 1) == 0
        and (d * public.e - 1) % (q - 1) == 0
        and numbers.dmp1 == d % (p - 1)
        and numbers.dmq1 == d % (q - 1)
        and 0 < numbers.iqmp < p
        and numbers.iqmp * q % p == 1
    )


def _can_sign(key: SigningKey) -> bool:
    return key.verifying().is_signature(key.sign(b"test"), b"test")


def _has_known_shape(public_der: bytes) -> bool:
    """Return whether this is the DER of a 2048-bit modulus with exponent 65537 or 17."""
    shape = _PUBLIC_SHAPES.get(len(public_der))
    if shape is None:
        return False
    start, end = shape
    return (
        public_der.startswith(start)
        and public_der.endswith(end)
        and public_der[len(start)] >= 0x80  # the modulus has its highest bit set
    )
