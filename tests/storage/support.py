"""Stores in scratch directories, with a settable clock and disk, and a way to kill them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.storage.share_store import ShareStore, StoreSettings
from pipegrid.wire.storage_messages import LeaseSecrets, UploadSecrets

P = ParamSpec("P")
T = TypeVar("T")

SI = bytes(range(16))
SI_TEXT = base32.encode(SI)
NOW = 1_700_000_000
SECRETS = UploadSecrets(LeaseSecrets(b"r" * 32, b"c" * 32), b"u" * 32)
OTHERS_SECRETS = UploadSecrets(LeaseSecrets(b"R" * 32, b"C" * 32), b"U" * 32)


class StoreTestCase(SynchronousTestCase):
    """A test with a storage directory; every store made here is closed afterwards."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.now = float(NOW)
        self.free: int | None = 1 << 40
        self.boot = b"b" * 16
        self.store = self.make_store()

    def make_store(self, **options: Any) -> ShareStore:
        """Open the directory, as another process would."""
        names = {each.name for each in attrs.fields(StoreSettings)}
        given = {name: options.pop(name) for name in names & options.keys()}
        store = ShareStore(
            self.root,
            StoreSettings(**given),
            clock=lambda: self.now,
            free_bytes=lambda path: self.free,
            boot_id=lambda: self.boot,
            **options,
        )
        self.addCleanup(store.close)
        return store

    def incoming(self, number: int, suffix: str = "") -> Path:
        """Return where an unfinished share lies."""
        return self.root / "shares/incoming" / f"{SI_TEXT}.{number}{suffix}"

    def final(self, number: int) -> Path:
        """Return where a complete share lies."""
        return self.root / "shares" / SI_TEXT[:2] / SI_TEXT / f"{number}"

    def put(self, number: int, data: bytes, secrets: UploadSecrets = SECRETS) -> None:
        """Store a whole share."""
        self.store.allocate(SI, {number}, len(data), secrets)
        upload = self.store.upload(SI, number, secrets.upload)
        upload.write(0, [data])
        upload.publish()

    def get(self, number: int) -> bytes:
        """Read a whole share, as a process that has just started would."""
        with self.make_store().open_share(SI, number) as reader:
            return reader.read(0, 1 << 30)
