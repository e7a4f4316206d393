"""One key stream runs through a file, and any part of it can be had alone."""

from __future__ import annotations

from collections.abc import Callable

from Crypto.Cipher import AES
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import stream_cipher
from pipegrid.core.stream_cipher import StreamCipher

KEY = bytes(range(16))
BOTH = (stream_cipher.openssl, stream_cipher.pycryptodome)


def key_stream(start: int, length: int) -> bytes:
    """Return key stream bytes by the book: the encrypted numbers of the 16-byte blocks."""
    block_cipher = AES.new(KEY, AES.MODE_ECB)
    first, last = start // 16, (start + length) // 16
    stream = b"".join(
        block_cipher.encrypt(number.to_bytes(16, "big")) for number in range(first, last + 1)
    )
    return stream[start % 16 : start % 16 + length]


class StreamCipherTests(SynchronousTestCase):
    """AES in counter mode from any byte of the file."""

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(
        st.one_of(st.integers(0, 200), st.integers(0, 1 << 50)),
        st.lists(st.integers(0, 70), max_size=4),
        st.sampled_from(BOTH),
    )
    def test_any_offset_and_any_cuts(
        self, offset: int, lengths: list[int], begin: Callable[[bytes, int], stream_cipher.Apply]
    ) -> None:
        """The key stream is a function of the offset alone, far beyond 2^32 blocks too."""
        self.patch(stream_cipher, "_begin", begin)
        cipher = StreamCipher(KEY, offset)
        for length in lengths:
            output = bytearray(length)
            cipher.apply(bytes(length), output)
            self.assertEqual(bytes(output), key_stream(offset, length))
            offset += length

    def test_encrypting_twice_decrypts(self) -> None:
        """Encrypting and decrypting are the same act; the output may be the input."""
        buffer = bytearray(b"attack at dawn, or perhaps a little later")
        for begin in (*BOTH, *reversed(BOTH)):
            self.patch(stream_cipher, "_begin", begin)
            StreamCipher(KEY, 5).apply(buffer, buffer)
        self.assertEqual(buffer, b"attack at dawn, or perhaps a little later")

    def test_part_of_a_buffer_is_enough(self) -> None:
        """Views are ciphered where they are, without touching their neighbours."""
        for begin in BOTH:
            self.patch(stream_cipher, "_begin", begin)
            whole = bytearray(b"-" * 30)
            StreamCipher(KEY).apply(memoryview(bytes(10)), memoryview(whole)[10:20])
            self.assertEqual(bytes(whole), b"-" * 10 + key_stream(0, 10) + b"-" * 10)

    def test_the_quicker_one_is_used(self) -> None:
        """Here, where TLS is, it must be there."""
        self.assertIs(stream_cipher._begin, stream_cipher.openssl)
