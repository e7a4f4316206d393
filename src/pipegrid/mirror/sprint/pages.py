"""Memory that sockets are read into, and from which answers are cut out."""

from __future__ import annotations

PAGE_BYTES = 256 << 10
"""Received at a time. What is hashed, and written, right after that is still in the processor's cache."""


class Page:
    """
    Memory that is read into.

    Attributes:
        users: jobs of the thread that still need what is in it, and one more while it is being parsed.
    """

    __slots__ = ("data", "users", "view")

    def __init__(self) -> None:
        self.data = bytearray(PAGE_BYTES)
        self.view = memoryview(self.data)
        self.users = 0
