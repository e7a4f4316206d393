"""
The write caps of a read-write directory's children: encrypted so that only its writers read them.

The key follows from the directory's write key and a salt, and the salt from the cap itself, so that the
same child gives the same bytes again. There is a checksum, too, which nobody checks: the directory's
signature covers it all.

Source: the format reference for mutable files, section 7.
"""

from __future__ import annotations

import hashlib

from pipegrid.core.caps import Cap, UnknownCap, parse_cap
from pipegrid.core.crypto import applied
from pipegrid.core.hashes import HASH_BYTES, KEY_BYTES, Tag
from pipegrid.errors import CapError

_SALT = Tag(b"allmydata_dirnode_child_rwcap_to_salt_v1")
_KEY = Tag(b"allmydata_mutable_writekey_and_salt_to_dirnode_child_capkey_v1")
_SALT_BYTES = 16
_LEAST_BYTES = _SALT_BYTES + HASH_BYTES


def encrypt_write_cap(cap_text: str, writekey: bytes) -> bytes:
    """
    Return what a directory stores for a child's write cap: 48 bytes more than it has, never none.

    Args:
        cap_text: the write cap, or "" if there is none.
        writekey: 16 bytes, the directory's own.
    """
    text = cap_text.encode("utf-8")
    salt = _SALT.hash(text)[:_SALT_BYTES]
    key = _child_key(salt, writekey)
    ciphertext = applied(key, text)
    inner = hashlib.sha256(_xored(key, 0x36) + salt + ciphertext).digest()
    return salt + ciphertext + hashlib.sha256(_xored(key, 0x5C) + inner).digest()


def decrypt_write_cap(rw_data: bytes, writekey: bytes) -> str | None:
    """Return a child's write cap, "" if it has none; None if the bytes are not of this directory."""
    if len(rw_data) < _LEAST_BYTES:
        return None if rw_data else ""
    salt, ciphertext = rw_data[:_SALT_BYTES], rw_data[_SALT_BYTES:-HASH_BYTES]
    try:
        return applied(_child_key(salt, writekey), ciphertext).decode("utf-8").rstrip(" ")
    except UnicodeDecodeError:
        return None


def open_write_cap(rw_data: bytes, writekey: bytes) -> Cap | None:
    """Return a child's write cap; None if it has none, or the bytes are not of this directory."""
    text = decrypt_write_cap(rw_data, writekey)
    if not text:
        return None
    try:
        return parse_cap(text)
    except CapError:
        # One bad child must not hide the others; an unknown cap can at least be shown.
        return UnknownCap(text)


def _child_key(salt: bytes, writekey: bytes) -> bytes:
    return _KEY.hash_pair(salt, writekey)[:KEY_BYTES]


def _xored(key: bytes, value: int) -> bytes:
    return bytes(byte ^ value for byte in key)
