"""
What a signature file may hold: OpenPGP's signature packets (RFC 4880), as text or bytes, and nothing else;
and where in a signed text the signature is.

gpgv takes any packets in their place, unpacks those that are packed before it asks whose they are, and has
been led astray by messages within messages. A kilobyte of anybody's kept it busy for as long as it was let.

All of this is read before anybody knows whose it is, so it is read line by line, each line once: the time is
linear in the bytes, and next to nothing of them is kept.
"""

from __future__ import annotations

import binascii
import re
from io import BytesIO

MESSAGE = b"-----BEGIN PGP SIGNED MESSAGE-----"
_BEGIN = b"-----BEGIN PGP SIGNATURE-----"
_END = b"-----END PGP SIGNATURE-----"

_HEADER = re.compile(rb"[^\n:]+:[^\n]*")
_BODY = re.compile(rb"[A-Za-z0-9+/]+")
_LAST = re.compile(rb"[A-Za-z0-9+/]+={1,2}")
_CHECKSUM = re.compile(rb"=[A-Za-z0-9+/]{4}")

_SIGNATURE = 2
_LENGTH_BYTES = {0: 1, 1: 2, 2: 4}
"""Of old packets; the fourth kind has no end."""


def signed_parts(data: bytes) -> tuple[bytes, bytes] | None:
    """
    Return of a text with its signature what was signed, and the signature.

    Lines of the text that begin with a dash are still escaped. None: it is no such text, or something is
    before, between or after its parts.
    """
    line, at = _line(data, 0)
    if line != MESSAGE:
        return None
    while line:
        line, at = _line(data, at)
        if line and not line.startswith(b"Hash: "):
            return None
        if at > len(data):
            return None
    start, search = at, at - 1
    while (dash := data.find(b"\n-", search)) >= 0:
        line, after = _line(data, dash + 1)
        if line == _BEGIN:
            break
        if not line.startswith(b"- ") and line != b"-":  # a lone dash has lost the blank at its end
            return None
        search = after - 1
    else:
        return None
    end = data.find(b"\n-", after - 1)
    if end < 0:
        return None
    line, after_end = _line(data, end + 1)
    if line != _END or not _is_blank(data, after_end):
        return None
    return data[start : dash + 1], data[dash + 1 : after_end]


def _line(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the line that begins there, without blanks at its end, and where the next begins."""
    end = data.find(b"\n", at)
    if end < 0:
        end = len(data)
    return data[at:end].rstrip(), end + 1


def _is_blank(data: bytes, at: int) -> bool:
    return all(line.isspace() for line in BytesIO(data[at:]))


def unescaped(text: bytes) -> bytes:
    """Return what ``signed_parts`` gave as it was before it was signed."""
    return text.removeprefix(b"- ").replace(b"\n- ", b"\n")


def signature_packets(data: bytes) -> bytes | None:
    """Return the packets of a signature, or of several; None: it is something else, or has that within."""
    if data[:1] < b"\x80":  # each packet begins with a higher byte
        packets = _dearmored(data)
        if packets is None:
            return None
        data = packets
    return data if data and _are_signatures(data) else None


def _dearmored(text: bytes) -> bytes | None:
    """Return the packets of signatures that are text, one after the other; None: there is more in it."""
    packets = bytearray()
    lines = BytesIO(text)
    for raw in lines:
        line = raw.strip() if not packets else raw.rstrip()
        if not line:
            continue
        block = _block(lines) if line == _BEGIN else None
        if block is None:
            return None
        packets += block
    return bytes(packets)


def _block(lines: BytesIO) -> bytes | None:
    """Return the packets of one signature, up to its last line; None: it is none."""
    for raw in lines:
        line = raw.rstrip()
        if not line:
            break
        if _HEADER.fullmatch(line) is None:
            return None
    body = bytearray()
    is_last = False
    for raw in lines:
        line = raw.rstrip()
        if line == _END:
            break
        if body and _CHECKSUM.fullmatch(line) is not None:
            line = lines.readline().rstrip()
            if line != _END:
                return None
            break
        if is_last or (_BODY.fullmatch(line) is None and _LAST.fullmatch(line) is None):
            return None
        is_last = line.endswith(b"=")
        body += line
    else:
        return None
    try:
        return binascii.a2b_base64(body) if body else None
    except binascii.Error:
        return None


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
