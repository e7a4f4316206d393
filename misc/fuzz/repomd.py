"""
XML of an RPM repository, cut anywhere: only ``BadEntry`` is raised; the cuts change nothing; no path leads
out of a mirror or to where indexes are, and what proves a file is no weak hash.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import pairwise

from misc.fuzz.choices import Choices
from pipegrid.mirror.archive_file import DIGEST_BYTES, MAX_SIZE_BYTES, ArchiveFile, BadEntry
from pipegrid.mirror.package_filter import PackageFilter, select
from pipegrid.mirror.rpm_metadata import REPOMD, SIGNATURE, compare_versions, packages, read_repomd
from pipegrid.mirror.rpm_repository import described

_HASH = "0123456789abcdef" * 4


def run(data: bytes) -> None:
    """Let the first bytes say where the rest is cut, and read it as everything it might be."""
    choices = Choices(data)
    cuts = [choices.number(2) for _ in range(choices.below(6))]
    text = choices.rest()
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(places)]
    found = _outcome(lambda: list(packages([text], "x")))
    again = _outcome(lambda: list(packages(pieces, "x")))
    # Where it stops being XML is told by line and column, which are those of the piece.
    assert (again == found) or not isinstance(found, list), "cuts change it"
    assert isinstance(found, list) == isinstance(again, list), "cuts change whether it is read"
    if isinstance(found, list):
        _check(each.file for each in found)
        assert not any(each.file.path.startswith("repodata/") for each in found)
        wanted = [PackageFilter(newest=1)]
        best = [each for _, each in select(map(described, found), wanted, compare_versions)]
        for each in found:
            assert any(
                (one.name, one.arch) == (each.name, each.arch)
                and compare_versions(one.version, each.version) >= 0
                for one in best
            ), "none that is as new is kept"
    try:
        repomd = read_repomd(text, "x")
    except BadEntry as error:
        assert str(error)
        return
    _check(each.file for each in repomd.files)
    paths = [each.file.path for each in repomd.files]
    assert len(set(paths) - {REPOMD, SIGNATURE}) == len(paths)
    assert repomd.primary.kind == "primary"


def _outcome(read: Callable[[], list[object]]) -> object:
    try:
        return read()
    except BadEntry as error:
        assert str(error), "a refusal that says nothing"
        assert "\n" not in str(error), "a refusal of several lines"
        return str(error)


def _check(found: Iterable[ArchiveFile]) -> None:
    for each in found:
        assert os.path.normpath(f"/root/{each.path}") == f"/root/{each.path}", "it leads elsewhere"
        assert len(each.digest) == DIGEST_BYTES[each.algorithm]
        assert each.size is not None
        assert 0 <= each.size <= MAX_SIZE_BYTES


def seeds() -> dict[str, bytes]:
    """Return documents, good and bad."""
    package = (
        '<package type="rpm"><name>{name}</name><arch>noarch</arch><version epoch="0" ver="{version}"'
        f' rel="1"/><checksum type="sha256" pkgid="YES">{_HASH}</checksum><size package="3"/>'
        '<location href="{path}"/><format><rpm:license>a</rpm:license></format></package>'
    )
    rows = (("a", "1.0~rc1", "p/a.rpm"), ("a", "1.0^1", "p/b.rpm"), ("b", "01", "./c.rpm"))
    many = "".join(package.format(name=n, version=v, path=p) for n, v, p in rows)
    out = package.format(name="a", version="1", path="../a")
    data = (
        f'<data type="primary"><checksum type="sha256">{_HASH}</checksum><open-checksum type="sha512">'
        f'{_HASH * 2}</open-checksum><location href="repodata/p.gz"/><timestamp>1.5</timestamp>'
        "<size>3</size><open-size>4</open-size></data>"
    )
    made = {
        "primary": f"<metadata>{many}</metadata>",
        "leads-out": f"<metadata>{out}</metadata>",
        "repomd": f"<?xml version='1.0' encoding='UTF-8'?><repomd><revision>1</revision>{data}</repomd>",
        "doctype": '<!DOCTYPE a [<!ENTITY b "c">]><metadata>&b;</metadata>',
        "page": "<html>Please log in</html>\n",
    }
    found = {name: b"\x00" + text.encode() for name, text in made.items()}
    found["cut"] = b"\x03\x00\x10\x00\x45\x00\x77" + made["primary"].encode()
    return found
