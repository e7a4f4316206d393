"""
What a signature file may hold: OpenPGP's signature packets (RFC 4880), as text or bytes, and nothing else.

gpgv takes any packets in their place, unpacks those that are packed before it asks whose they are, and has
been led astray by messages within messages. A kilobyte of anybody's kept it busy for as long as it was let.
"""

from __future__ import annotations

import binascii
import re

_ARMORED = re.compile(
    rb"-----BEGIN PGP SIGNATURE-----\n(?:[^\n:]+: ?[^\n]*\n)*\n"
    rb"((?:[A-Za-z0-9+/]+\n)*[A-Za-z0-9+/]+={0,2}\n)(?:=[A-Za-z0-9+/]{4}\n)?"
    rb"-----END PGP SIGNATURE-----\n*"
)
"""Nothing of it can be read in two ways."""

_SIGNATURE = 2
_LENGTH_BYTES = {0: 1, 1: 2, 2: 4}
"""Of old packets; the fourth kind has no end."""


def signature_packets(data: bytes) -> bytes | None:
    """Return the packets of a signature, or of several; None: it is something else, or has that within."""
    if data[:1] < b"\x80":  # each packet begins with a higher byte
        text = b"\n".join(line.rstrip() for line in data.strip().split(b"\n")) + b"\n"
        if _ARMORED.sub(b"", text):
            return None
        try:
            data = b"".join(map(binascii.a2b_base64, _ARMORED.findall(text)))
        except binascii.Error:
            return None
    return data if data and _are_signatures(data) else None


def _are_signatures(data: bytes) -> bool:
    at = 0
    try:
        while at < len(data):
            kind, begin, length = _packet(data, at)
            if kind != _SIGNATURE or length is None:
                return False
            at = begin + length
    except IndexError:
        return False
    return at == len(data)


def _packet(data: bytes, at: int) -> tuple[int, int, int | None]:
    """
    Return a packet's kind, where its body begins, and how long that is; None: nobody says.

    Raises:
        IndexError: its head is cut off.
    """
    head, first = data[at], data[at + 1]
    if not head & 0x80:
        return -1, at, None
    if not head & 0x40:  # as of old
        count = _LENGTH_BYTES.get(head & 3)
        if count is None:
            return head >> 2 & 15, at + 1, None
        return head >> 2 & 15, at + 1 + count, int.from_bytes(data[at + 1 : at + 1 + count], "big")
    if first < 192:
        return head & 63, at + 2, first
    if first < 224:
        return head & 63, at + 3, (first - 192 << 8) + data[at + 2] + 192
    if first < 255:  # it comes in parts
        return head & 63, at + 2, None
    return head & 63, at + 6, int.from_bytes(data[at + 2 : at + 6], "big")
