"""
What the cap proves about shares: whose version each of them is.

The fingerprint proves the public key, once; the key proves each version by its signature, once. After that
a share needs to show its header and nothing else.

Source: the format reference for mutable files, section 5, step 2.
"""

from __future__ import annotations

from pipegrid.core.caps import MutableCap
from pipegrid.core.mutable.keys import (
    SigningKey,
    VerifyingKey,
    load_verifying_key,
    open_signing_key,
)
from pipegrid.core.mutable.share import MutableShare, Part, damaged
from pipegrid.core.mutable.versions import Version
from pipegrid.core.spans import Range


class ShareBook:
    """
    The proven key and versions of one file.

    Attributes:
        cap: of any access.
        verifying_key: once a share has shown it.
        signing_key: once a share has shown it and the cap allows, or as it was given.
    """

    def __init__(
        self,
        cap: MutableCap,
        verifying_key: VerifyingKey | None = None,
        signing_key: SigningKey | None = None,
    ) -> None:
        """
        Know nothing yet, or the keys that were proven before.
        """
        self.cap = cap
        self.signing_key = signing_key
        if verifying_key is None and signing_key is not None:
            verifying_key = signing_key.verifying()
        self.verifying_key = verifying_key
        self._signed: set[Version] = set()

    def trust(self, version: Version) -> None:
        """Take a version as signed: this process wrote it, or has checked it before."""
        self._signed.add(version)

    def missing(self, share: MutableShare) -> list[Range]:
        """
        Return the ranges that ``check`` still needs of a share; for a known version none but the header's.

        Raises:
            CorruptionError: the share ends too early.
        """
        return share.missing(*self._needed(share))

    def check(self, share: MutableShare) -> Version | None:
        """
        Return a share's version, proven, or None while bytes are ``missing``.

        Raises:
            CorruptionError: the public key is not the cap's, or the version was not signed with it, or has
                no share of this number.
        """
        if self.missing(share):
            return None
        header = share.header
        assert header is not None
        if share.number >= header.version.total_shares:
            total = header.version.total_shares
            raise damaged(share.number, f"its version has only {total} shares", 0)
        if header.version in self._signed:
            return header.version
        if self.verifying_key is None:
            public_der = share.read(Part.PUBLIC_KEY)
            self.verifying_key = load_verifying_key(public_der, self.cap, share.number)
        check_signed(share, header.version, self.verifying_key)
        self._signed.add(header.version)
        return header.version

    def open_signing_key(self, share: MutableShare) -> SigningKey | None:
        """
        Return the signing key, from this share if it is not known; None while the private key is not here.

        Raises:
            CorruptionError: the share's private key is not the one that the write cap proves.
        """
        if self.signing_key is None and share.has(Part.PRIVATE_KEY):
            encrypted = share.read(Part.PRIVATE_KEY)
            self.signing_key = open_signing_key(encrypted, self.cap, share.number)
            self.verifying_key = self.verifying_key or self.signing_key.verifying()
        return self.signing_key

    def _needed(self, share: MutableShare) -> tuple[Part, ...]:
        if share.header is None or share.header.version in self._signed:
            return (Part.HEADER,)
        if self.verifying_key is None:
            return (Part.HEADER, Part.PUBLIC_KEY, Part.SIGNATURE)
        return (Part.HEADER, Part.SIGNATURE)


def check_signed(share: MutableShare, version: Version, key: VerifyingKey) -> None:
    """
    Prove that a version is what a share's signature says, which is there.

    Raises:
        CorruptionError: it is not; names the share, and where in it the signature is.
    """
    if not key.is_signature(share.read(Part.SIGNATURE), version.signed_prefix):
        offset = share.range_of(Part.SIGNATURE)[0]
        raise damaged(share.number, "its signature does not fit what it says it is", offset)
