"""RPM repositories made by tests: ``repomd.xml``, ``primary`` and others, packages; again and again."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
from collections.abc import Callable
from xml.sax.saxutils import quoteattr

import attrs
import zstandard

from tests.mirror.archive import Signer, sha

REPOMD = "repodata/repomd.xml"

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    "": bytes,
}


@attrs.define
class Made:
    """One package; what is not given is right."""

    name: str
    data: bytes
    version: tuple[str, str, str] = ("0", "1", "1")
    arch: str = "x86_64"
    path: str = ""
    size: int | None = None
    checksum: str = ""
    kind: str = "sha256"
    further: str = ""
    source: str = ""

    def __attrs_post_init__(self) -> None:
        if not self.path:
            _, version, release = self.version
            self.path = f"Packages/{self.name[0]}/{self.name}-{version}-{release}.{self.arch}.rpm"

    def xml(self) -> str:
        """What ``primary`` says of it."""
        epoch, version, release = map(quoteattr, self.version)
        size = len(self.data) if self.size is None else self.size
        return (
            f'<package type="rpm"><name>{self.name}</name><arch>{self.arch}</arch>'
            f"<version epoch={epoch} ver={version} rel={release}/>"
            f'<checksum type="{self.kind}" pkgid="YES">{self.checksum or sha(self.data)}</checksum>'
            "<summary>nothing &amp; less</summary><packager/>"
            f'<time file="1" build="1"/><size package="{size}" installed="1" archive="1"/>'
            f"<location {self.further}href={quoteattr(self.path)}/>"
            f"<format>{self.source and f'<rpm:sourcerpm>{self.source}</rpm:sourcerpm>'}"
            '<rpm:license>MIT</rpm:license><rpm:provides><rpm:entry name="x"/></rpm:provides>'
            "<file>/usr/bin/x</file></format></package>"
        )


class RpmArchive:
    """
    A repository; ``files`` is how it is now.

    Args:
        signer: None: unsigned.
        ending: how indexes are packed.
    """

    def __init__(
        self, signer: Signer | None = None, *, count: int = 20, seed: int = 1, ending: str = ".zst"
    ) -> None:
        self._signer = signer
        self._rng = random.Random(seed)
        self.ending = ending
        self.revision = 1_700_000_000
        self.packages: list[Made] = []
        self.head = ""
        self.data_xml = ""
        self.files: dict[str, bytes] = {}
        for number in range(count):
            self.add(f"p{number}")
        self.publish()

    def add(self, name: str, *version: str, **further: object) -> Made:
        """One more package; it is there after ``publish``."""
        data = self._rng.randbytes(self._rng.randrange(1, 5000))
        made = Made(name, data, **({"version": version} if version else {}), **further)  # type: ignore[arg-type]
        self.packages.append(made)
        return made

    def primary(self) -> bytes:
        """``primary.xml``, unpacked."""
        return (
            f'<?xml version="1.0" encoding="UTF-8"?>\n{self.head}'
            '<metadata xmlns="http://linux.duke.edu/metadata/common"'
            f' xmlns:rpm="http://linux.duke.edu/metadata/rpm" packages="{len(self.packages)}">\n'
            + "\n".join(each.xml() for each in self.packages)
            + "\n</metadata>\n"
        ).encode()

    def publish(self) -> None:
        """Make the next generation."""
        self.revision += 100
        indexes = {"primary": self.primary(), "filelists": b"<filelists/>", "group": b"<comps/>"}
        files: dict[str, bytes] = {}
        rows = []
        for kind, data in indexes.items():
            packed = PACKERS[self.ending](data)
            path = f"repodata/{sha(packed)}-{kind}.xml{self.ending}"
            files[path] = packed
            rows.append(
                f'<data type="{kind}"><checksum type="sha256">{sha(packed)}</checksum>'
                f'<open-checksum type="sha256">{sha(data)}</open-checksum>'
                f'<location href="{path}"/><timestamp>{self.revision}</timestamp>'
                f"<size>{len(packed)}</size><open-size>{len(data)}</open-size></data>"
            )
        self.files = {**files, **{each.path: each.data for each in self.packages}}
        self.set_repomd("\n".join([*rows, self.data_xml]))

    def set_repomd(self, rows: str) -> None:
        """Let ``repomd.xml`` name these, and sign it."""
        text = (
            '<?xml version="1.0" encoding="UTF-8"?>\n<repomd xmlns="http://linux.duke.edu/metadata/repo"'
            f' xmlns:rpm="x">\n<revision>{self.revision}</revision>\n{rows}\n</repomd>\n'
        ).encode()
        self.files[REPOMD] = text
        if self._signer is not None:
            self.files[REPOMD + ".asc"] = self._signer.detached(text)

    @property
    def primary_path(self) -> str:
        """Where ``primary`` is now."""
        return next(path for path in self.files if "-primary.xml" in path)
