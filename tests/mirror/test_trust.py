"""Signatures, checked by the real gpgv with keys that are made here."""

from __future__ import annotations

import binascii
import bz2
import contextlib
import os
import subprocess
import tempfile
import tracemalloc
from pathlib import Path
from time import monotonic, process_time

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror.archive_file import BadEntry, MirrorError
from pipegrid.mirror.debian_metadata import MAX_RELEASE_BYTES, read_release
from pipegrid.mirror.debian_release_files import _says_the_same, unsigned_part
from pipegrid.mirror.signatures import (
    NotSigned,
    check_signature,
    refusal,
    signature_packets,
    signed_content,
    signed_parts,
)
from tests.mirror.archive import Signer

TEXT = b"Suite: sid\n- a dash\nDate: now\n"


class TrustTests(SynchronousTestCase):
    """What is believed, and what is not."""

    def signer(self, *arguments: str) -> Signer:
        """Make a key."""
        signer = Signer(*arguments)
        self.addCleanup(signer.close)
        return signer

    def refused(self, words: str, signed: bytes, *keyrings: str) -> None:
        """Look that it is, in one sentence."""
        error = self.assertRaises(NotSigned, signed_content, signed, keyrings, "the file")
        self.assertIn(words, str(error))
        self.assertIn("the file is not signed", str(error))
        self.assertNotIn("\n", str(error))

    def test_signed(self) -> None:
        """What was signed is given back, in either form; a ring may be bytes or text, one of several."""
        ours, other = self.signer(), self.signer()
        for rings in ((ours.keyring,), (ours.armored,), (other.keyring, ours.keyring)):
            self.assertEqual(signed_content(ours.inline(TEXT), rings, "x"), TEXT)
            check_signature(TEXT, ours.detached(TEXT), rings, "x")
        # Another's key alone does not do.
        self.refused("signed by another key", ours.inline(TEXT), other.keyring)
        self.assertRaises(
            NotSigned, check_signature, TEXT, ours.detached(TEXT), (other.keyring,), "x"
        )

    def test_changed(self) -> None:
        """One changed byte is enough."""
        ours = self.signer()
        signed = ours.inline(TEXT)
        self.refused("does not fit", signed.replace(b"now", b"new"), ours.keyring)
        self.assertRaises(
            NotSigned, check_signature, TEXT + b"x", ours.detached(TEXT), (ours.keyring,), "x"
        )
        self.refused("not signed at all", TEXT, ours.keyring)
        self.refused("not signed at all", b"", ours.keyring)
        self.refused("not signed at all", b"<html>log in</html>", ours.keyring)
        self.assertRaises(NotSigned, check_signature, TEXT, b"", (ours.keyring,), "x")

    def test_around(self) -> None:
        """A file with something before or behind the signed part is refused, though gpgv only skips that."""
        ours = self.signer()
        signed = ours.inline(TEXT)
        head, _, rest = signed.partition(b"\n\n")
        for data in (
            b"Suite: evil\n\n" + signed,
            signed + b"\nSuite: evil\n",
            signed + ours.inline(b"more\n"),
            head + b"\nSuite: evil\n\n" + rest,
        ):
            error = self.assertRaises(NotSigned, signed_content, data, (ours.keyring,), "x")
            self.assertIn("other text precedes or follows the signed one", str(error))

    def test_packets(self) -> None:
        """
        What is no text with its signature never reaches gpgv, which would unpack it whoever made it.

        The disk that it would be written to may be memory, and 300 bytes are 300 MB there.
        """
        ours = self.signer()
        bomb = _compressed(_literal(bytes(1 << 26)))
        self.assertLess(len(bomb), 1000)
        armored = binascii.b2a_base64(bomb)
        text = b"-----BEGIN PGP MESSAGE-----\n\n" + armored + b"-----END PGP MESSAGE-----\n"
        with tempfile.TemporaryDirectory() as gnupg:
            # A gpgv that leaves a trace.
            trace = Path(gnupg, "trace")
            Path(gnupg, "gpgv").write_text(f'#!/bin/sh\ntouch {trace}\nexec /usr/bin/gpgv "$@"\n')
            Path(gnupg, "gpgv").chmod(0o755)
            self.patch(os, "environ", {**os.environ, "PATH": f"{gnupg}:{os.environ['PATH']}"})
            signed_content(ours.inline(TEXT), (ours.keyring,), "x")
            self.assertTrue(trace.exists())
            trace.unlink()
            for data in (bomb, text):
                self.refused("not signed at all", data, ours.keyring)
            self.assertFalse(trace.exists())

    def test_what_stands_in_a_signatures_place(self) -> None:
        """
        Signatures, as bytes or text, one or several, reach gpgv; packed packets do not, alone or among them.

        Two kilobytes that unpack to a gigabyte kept it busy for as long as it was let.
        """
        ours, other = self.signer(), self.signer()
        armored = ours.detached(TEXT)
        packets = _joined(armored)
        crlf = armored.replace(b"\n", b"\r\n")
        commented = armored.replace(b"-----\n\n", b"-----\nVersion: 1\nComment: none\n\n", 1)
        for good in (packets, armored, crlf, commented, other.detached(TEXT) + armored):
            check_signature(TEXT, good, (ours.keyring,), "x")

        def refuse(*_arguments: object, **_more: object) -> None:
            raise AssertionError("gpgv was asked")

        self.patch(subprocess, "Popen", refuse)
        bomb = _compressed(_literal(bytes(1000)))
        for packed in (bomb, packets + bomb, bomb + packets, _literal(TEXT), packets[:-1], b"\xc2"):
            for bad in (packed, _armored(packed)):
                with self.assertRaises(NotSigned) as caught:
                    check_signature(TEXT, bad, (ours.keyring,), "x")
                self.assertIn("its signature is not one", str(caught.exception))
            text = b"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA512\n\nevil\n" + _armored(packed)
            self.refused("its signature is not one", text, ours.keyring)
        for bad in (b"", b"\n", b"<html>", b"x" + armored, armored + b"x", armored[:-5]):
            self.assertRaises(NotSigned, check_signature, TEXT, bad, (ours.keyring,), "x")

    def test_stopped(self) -> None:
        """A gpgv that does not end is not waited for when all is to end."""
        ours = self.signer()
        with tempfile.TemporaryDirectory() as gnupg:
            Path(gnupg, "gpgv").write_text("#!/bin/sh\nsleep 60\n")
            Path(gnupg, "gpgv").chmod(0o755)
            self.patch(os, "environ", {**os.environ, "PATH": f"{gnupg}:{os.environ['PATH']}"})
            begin = monotonic()
            with self.assertRaises(MirrorError) as caught:
                signed_content(ours.inline(TEXT), (ours.keyring,), "x", lambda: True)
            self.assertIn("stopped", str(caught.exception))
            self.assertLess(monotonic() - begin, 30)

    def test_expired(self) -> None:
        """A key that has expired does not count, though gpgv itself calls that a success."""
        old = Signer("2021-01-01", at="20200601T000000!")
        self.addCleanup(old.close)
        self.refused("the key has expired", old.inline(TEXT), old.keyring)

    def test_two_signatures(self) -> None:
        """Archives sign with several keys; one that is known is enough, unless another is wrong."""
        good, bad = b"[GNUPG:] GOODSIG A x\n[GNUPG:] VALIDSIG A\n", b"[GNUPG:] BADSIG B x\n"
        unknown = b"[GNUPG:] ERRSIG B 1 8 01 1 9\n[GNUPG:] NO_PUBKEY B\n"
        self.assertIsNone(refusal(unknown + good))
        self.assertIsNone(refusal(good))
        self.assertEqual(refusal(unknown), "it is signed by another key")
        self.assertIn("changed", refusal(good + bad) or "")
        self.assertIn("expired", refusal(b"[GNUPG:] EXPKEYSIG A x\n[GNUPG:] VALIDSIG A\n") or "")
        self.assertIsNotNone(refusal(b""))
        self.assertIsNotNone(refusal(b"x [GNUPG:] GOODSIG A\nx [GNUPG:] VALIDSIG A\n"))

    def test_several_keys_for_real(self) -> None:
        """A file with two signatures is believed by who has either key."""
        ours, other = self.signer(), self.signer()
        both = other.detached(TEXT) + ours.detached(TEXT)
        for ring in (ours.keyring, other.keyring):
            check_signature(TEXT, _joined(both), (ring,), "x")

    def test_weak(self) -> None:
        """A signature over SHA-1 proves nothing."""
        ours = self.signer()
        weak = ours.inline(TEXT, "--digest-algo", "SHA1", "--allow-weak-digest-algos")
        self.refused("gpgv does not accept it", weak, ours.keyring)

    def test_keyrings(self) -> None:
        """Without one that can be read there is a sentence, and no belief."""
        ours = self.signer()
        signed = ours.inline(TEXT)
        damaged = Path(self.mktemp())
        damaged.write_text(Path(ours.armored).read_text()[:-40])
        for rings, words in (
            ((), "give --keyring"),
            ((self.mktemp(),), "cannot be read (No such file"),
            ((str(damaged),), "is damaged"),
        ):
            error = self.assertRaises(MirrorError, signed_content, signed, rings, "x")
            self.assertIn(words, str(error))

    def test_no_gpgv(self) -> None:
        """The sentence says what to install."""
        ours = self.signer()
        signed = ours.inline(TEXT)
        for path in (self.mktemp(), ours.keyring):
            self.patch(os, "environ", {**os.environ, "PATH": path})
            error = self.assertRaises(MirrorError, signed_content, signed, (ours.keyring,), "x")
            self.assertIn("there is no gpgv", str(error))

    def test_nothing_is_left(self) -> None:
        """No file of a check stays."""
        ours = self.signer()
        directory = self.mktemp()
        os.makedirs(directory)
        self.patch(os, "environ", {**os.environ, "TMPDIR": os.path.abspath(directory)})
        self.patch(tempfile, "tempdir", None)
        signed_content(ours.inline(TEXT), (ours.armored,), "x")
        self.assertEqual(os.listdir(directory), [])


def _armored(packets: bytes) -> bytes:
    """A signature as text."""
    lines = binascii.b2a_base64(packets)
    return b"-----BEGIN PGP SIGNATURE-----\n\n" + lines + b"-----END PGP SIGNATURE-----\n"


def _joined(armored: bytes) -> bytes:
    """Two signatures as one file of bytes."""
    out = b""
    for block in armored.split(b"-----BEGIN PGP SIGNATURE-----\n")[1:]:
        lines = block.partition(b"-----END")[0].split(b"\n")
        out += binascii.a2b_base64(b"".join(line for line in lines if line[:1] != b"="))
    return out


def _literal(data: bytes) -> bytes:
    """Return a packet that holds data (RFC 4880, 5.9)."""
    body = b"b\0\0\0\0\0" + data
    return b"\xcb\xff" + len(body).to_bytes(4, "big") + body


def _compressed(packet: bytes) -> bytes:
    """Return one in a packet that is compressed by bzip2 (5.6)."""
    body = b"\x03" + bz2.compress(packet)
    return b"\xc8\xff" + len(body).to_bytes(4, "big") + body


class RemoteBytesTests(SynchronousTestCase):
    """What anybody may send before it is known who signed it: time and memory are in proportion to it."""

    def test_headers(self) -> None:
        """Sixty headers in a signature's armour are refused at once; an expression never came to an end."""
        headers = b"a: b\n" * 60
        signature = b"-----BEGIN PGP SIGNATURE-----\n" + headers
        text = b"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA512\n\nx\n" + signature
        for tail in (b"", b"\n", b"\nAAAA\n", b"\n-----END PGP SIGNATURE-----\n"):
            for function, data in (
                (signature_packets, signature + tail),
                (signed_parts, text + tail),
            ):
                begin = process_time()
                function(data)
                self.assertLess(process_time() - begin, 1.0)

    def test_doubled(self) -> None:
        """Twice as many bytes take about twice as long, whatever they are."""
        begin = b"-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA512\n\n"
        signature = b"-----BEGIN PGP SIGNATURE-----\n"
        for prefix in (b"", begin, signature, begin + b"x\n" + signature, signature + b"\n"):
            for piece in (
                b"\n",
                b" ",
                b"-",
                b"\n-",
                b"\n- ",
                b"A",
                b"A\n",
                b"a: b\n",
                b"=AAAA\n",
                begin,
            ):
                took = []
                for count in (1 << 15, 1 << 16):
                    data = prefix + piece * (count // len(piece))
                    started = process_time()
                    for function in (signature_packets, signed_parts, unsigned_part):
                        function(data)
                    _says_the_same(data, data + b"x")
                    took.append(process_time() - started)
                self.assertLess(took[1], 6 * max(took[0], 0.02), (prefix, piece))

    def test_newlines(self) -> None:
        """A release file of nothing else needs no more than a few copies of it."""
        newlines = b"\n" * (MAX_RELEASE_BYTES // 8)
        for data in (
            newlines,
            b"-----BEGIN PGP SIGNED MESSAGE-----\n" + newlines,
            b"a: b\n \n" + newlines,
        ):
            tracemalloc.start()
            try:
                signed_parts(data)
                _says_the_same(data, data + b"x")
                with contextlib.suppress(BadEntry):
                    read_release(unsigned_part(data), "it", list[BadEntry]().append)
                self.assertIsNone(signature_packets(data[: 1 << 18]))
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            self.assertLess(peak, 6 << 20)
