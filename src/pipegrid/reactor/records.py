"""How many bytes TLS is given at a time, whichever library does it."""

from __future__ import annotations

RECORD_BYTES = 2**14
"""No record holds more."""

BATCH_BYTES = 4 * RECORD_BYTES
"""Given to OpenSSL at a time, in either direction: for each connection it keeps as large a buffer."""

DELIVERY_BYTES = 2 * BATCH_BYTES
"""Decrypted before it is copied to a buffer of its own."""

GATHERED_BYTES = 2 * BATCH_BYTES
"""Encrypted before it is sent: each call of the kernel costs, and wakes the receiver, which costs there."""
