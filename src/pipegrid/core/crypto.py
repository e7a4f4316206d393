"""
The cipher of immutable files: AES-128 in counter mode, one key stream for the whole file.

Byte ``x`` of a file is always combined with byte ``x`` of the key stream, so encrypting and
decrypting are the same act, and any part of a file can be handled without the rest.

Source: the format reference, section 2.3.
"""

from __future__ import annotations

from Crypto.Cipher import AES

from pipegrid.core.hashes import KEY_BYTES, Buffer

WritableBuffer = bytearray | memoryview

_CIPHER_BLOCK_BYTES = 16


class StreamCipher:
    """
    The key stream of one file from some byte on: ``apply`` uses it up in order.

    Large buffers are ciphered without the GIL. One cipher must not be used by two threads at once.
    """

    __slots__ = ("_cipher",)

    def __init__(self, key: bytes, offset: int = 0) -> None:
        """
        Position the key stream.

        Args:
            key: 16 bytes.
            offset: the first byte of the file that ``apply`` will be given; any, not only
                multiples of the cipher's block size.
        """
        assert len(key) == KEY_BYTES
        assert offset >= 0
        counter, skip = divmod(offset, _CIPHER_BLOCK_BYTES)
        self._cipher = AES.new(key, AES.MODE_CTR, nonce=b"", initial_value=counter)
        if skip:
            self._cipher.encrypt(bytes(skip))

    def apply(self, data: Buffer, output: WritableBuffer) -> None:
        """
        Encrypt or decrypt the next bytes of the file into output.

        Args:
            data: what to cipher.
            output: as long as data; may be data itself.
        """
        self._cipher.encrypt(data, output=output)
