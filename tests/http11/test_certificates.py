"""Certificates read without a library: what is taken is right, and what is not right is not taken."""

from __future__ import annotations

import datetime
from hashlib import sha256
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.http11 import pinned_key, public_key_pin
from pipegrid.http11.pinned_key import UnusualCertificate, check_signed_by_itself, problem_of, read

KEY = rsa.generate_private_key(65537, 2048)
OTHER = rsa.generate_private_key(65537, 2048)


def certificate(
    key: Any = KEY, signer: Any = None, issuer: str = "x", algorithm: Any = None, **more: Any
) -> bytes:
    """Return a certificate, DER, that has long expired."""
    start = datetime.datetime(2001, 1, 1)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=365))
        .sign(signer or key, algorithm or hashes.SHA256(), **more)
    )
    return made.public_bytes(Encoding.DER)


DER = certificate()
PIN = public_key_pin(x509.load_der_x509_certificate(DER))


class CertificateTests(SynchronousTestCase):
    """``certificates``, beside ``cryptography``."""

    def test_usual(self) -> None:
        """RSA with SHA-2: the key's hash is that which ``cryptography`` tells, and the signature is right."""
        for algorithm in (hashes.SHA256(), hashes.SHA384(), hashes.SHA512()):
            found = read(certificate(algorithm=algorithm))
            check_signed_by_itself(found)
            self.assertEqual(sha256(found.key).digest(), PIN)

    def test_unusual(self) -> None:
        """Whoever else signed it, with another kind of key or in another way: not for this module to say."""
        curve = ec.generate_private_key(ec.SECP256R1())
        pss = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
        for der in (
            certificate(signer=OTHER),
            certificate(issuer="somebody else"),
            certificate(curve),
            certificate(rsa_padding=pss),
            certificate(rsa.generate_private_key(65537, 1024)),
        ):
            self.assertRaises(UnusualCertificate, check_signed_by_itself, read(der))

    def test_a_signature_with_too_much_in_it(self) -> None:
        """All of the padding is looked at; with small exponents something could hide behind the hash."""
        found = read(DER)
        for change in (b"\0" + found.signature, found.signature[:-1], bytes(256), b"\xff" * 256):
            forged = pinned_key.Certificate(
                found.signed, found.algorithm, found.key, change, found.own_issuer
            )
            self.assertRaises(UnusualCertificate, check_signed_by_itself, forged)

    @given(st.integers(0, len(DER) - 1), st.integers(1, 255))
    def test_one_changed_byte(self, at: int, change: int) -> None:
        """Wherever it is, the certificate is not taken."""
        damaged = bytearray(DER)
        damaged[at] ^= change
        with self.assertRaises(UnusualCertificate):
            check_signed_by_itself(read(bytes(damaged)))

    @given(st.integers(0, len(DER) - 1))
    def test_cut_off(self, size: int) -> None:
        """Nor a part of it, nor one with something behind it."""
        self.assertRaises(UnusualCertificate, read, DER[:size])
        self.assertRaises(UnusualCertificate, read, DER + DER[:1] * (size + 1))

    @given(st.binary(max_size=300))
    def test_nonsense(self, data: bytes) -> None:
        """Nothing else is raised, whatever it is given."""
        for each in (data, DER[:4] + data, DER[: len(DER) // 2] + data):
            with self.assertRaises(UnusualCertificate):
                read(each)

    def test_other_ways_to_write_the_same(self) -> None:
        """Lengths in a longer form or an indefinite one: another reader might go on elsewhere."""
        body = DER[4:]
        size = len(body)
        for head in (
            b"\x30\x83\0" + size.to_bytes(2, "big"),
            b"\x30\x84\0\0" + size.to_bytes(2, "big"),
        ):
            self.assertRaises(UnusualCertificate, read, head + body)
        self.assertRaises(UnusualCertificate, read, b"\x30\x80" + body + b"\0\0")
        self.assertRaises(UnusualCertificate, read, b"\x30\x84\xff\xff\xff\xff" + body)


class ProblemTests(SynchronousTestCase):
    """``problem_of``: the usual ones without ``cryptography``, all others with it."""

    def test_usual_without_a_second_look(self) -> None:
        """That is what saves the time."""
        self.patch(pinned_key, "_second_look", None)
        self.assertIsNone(problem_of(DER, PIN, "s"))

    def test_unusual_is_fine_with_a_second_look(self) -> None:
        """An elliptic curve is as good."""
        der = certificate(ec.generate_private_key(ec.SECP256R1()))
        pin = public_key_pin(x509.load_der_x509_certificate(der))
        self.assertIsNone(problem_of(der, pin, "s"))

    def test_problems(self) -> None:
        """Each has its sentence."""
        for der, pin, words in (
            (DER, bytes(32), "s is not the server it should be: its key hashes to "),
            (certificate(signer=OTHER), PIN, "The certificate of s is not signed by its own key; "),
            (certificate(issuer="y"), PIN, "The certificate of s is not signed by its own key; "),
            (DER[:-1], PIN, "The certificate of s cannot be understood ("),
        ):
            problem = problem_of(der, pin, "s")
            self.assertIn(words, str(problem))
            self.assertIn("nothing was sent to it, check its address.", str(problem))

    def test_the_right_key_in_another_place(self) -> None:
        """A certificate about another key, with the pinned one wherever it finds room, is not taken."""
        spki = read(DER).key
        der = certificate(OTHER)
        at = der.index(read(der).key)
        for forged in (der + spki, der[:at] + spki + der[at:], spki + der):
            self.assertIsNotNone(problem_of(forged, PIN, "s"))
