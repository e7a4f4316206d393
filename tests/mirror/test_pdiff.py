"""Patches of indexes: ed scripts as ``diff`` makes them, one and many, whole and damaged."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import os
import random
import subprocess
import threading
import time
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.command_grammar import start
from pipegrid.cli.console import Console
from pipegrid.mirror import decompression, pdiff
from pipegrid.mirror.decompression import PatchError
from pipegrid.mirror.pdiff import LineEdit, apply_patches, merge, parse

LINES = (
    b"a\n",
    b"b\n",
    b".\n",
    b"..\n",
    b"...\n",
    b"\n",
    b"s/.//\n",
    b"1d\n",
    b"long " * 30 + b"\n",
)

SCRIPT = (*LINES, b"1a\n", b"2c\n", b"1,2d\n")


def diff(old: bytes, new: bytes, directory: Path) -> bytes:
    """Return what ``diff --ed`` says, which the archive publishes."""
    for name, data in (("old", old), ("new", new)):
        (directory / name).write_bytes(data)
    return subprocess.run(
        ["diff", "--ed", "old", "new"], cwd=directory, stdout=subprocess.PIPE, check=False
    ).stdout


class PatchCase(SynchronousTestCase):
    """A scratch directory."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir(parents=True)
        self.count = 0

    def file(self, data: bytes) -> str:
        """Make a file; returns its path."""
        self.count += 1
        path = self.directory / f"file{self.count}"
        path.write_bytes(data)
        return str(path)

    def patched(self, index: bytes, *patches: bytes) -> bytes:
        """Return what comes out, whose hash and size must be as told."""
        out = self.directory / "out"
        with out.open("wb") as file:
            told = apply_patches(self.file(index), [self.file(p) for p in patches], file.fileno())
        data = out.read_bytes()
        self.assertEqual((told.size_bytes, told.digest), (len(data), sha256(data).digest()))
        return data


class ApplyTests(PatchCase):
    """What comes out is what ``diff`` compared with."""

    @given(st.data())
    @settings(max_examples=60, deadline=None, derandomize=True)
    def test_any_history(self, data: st.DataObject) -> None:
        """One patch after the other, and all at once, lead from the first version to the last."""
        versions = [
            b"".join(data.draw(st.lists(st.sampled_from(LINES), max_size=12))) for _ in range(4)
        ]
        patches = [diff(old, new, self.directory) for old, new in pairwise(versions)]
        for old, patch, new in zip(versions, patches, versions[1:], strict=False):
            self.assertEqual(self.patched(old, patch), new)
        self.assertEqual(self.patched(versions[0], *patches), versions[-1])

    def test_large_ones(self) -> None:
        """Longer than chunks and blocks; with numpy and without."""
        rng = random.Random(7)
        lines = [b"%d %s\n" % (n, b"x" * rng.randrange(200)) for n in range(50_000)]
        versions = [lines]
        for _ in range(3):
            lines = list(lines)
            for _ in range(100):
                at = rng.randrange(len(lines))
                lines[at : at + rng.randrange(4)] = [b"new\n"] * rng.randrange(4)
            versions.append(lines)
        joined = [b"".join(version) for version in versions]
        self.assertGreater(len(joined[0]), 4 * decompression.CHUNK_BYTES)
        patches = [diff(old, new, self.directory) for old, new in pairwise(joined)]
        for worth_numpy_bytes in (0, 1 << 40):
            self.patch(pdiff, "WORTH_NUMPY_BYTES", worth_numpy_bytes)
            for pack in (bytes, gzip.compress, zstandard.compress):
                self.assertEqual(self.patched(pack(joined[0]), *patches), joined[-1])
        self.patch(pdiff, "WORTH_NUMPY_BYTES", 0)
        with mock.patch.object(pdiff, "_numpy", return_value=None):
            self.assertEqual(self.patched(joined[0], *patches), joined[-1])

    def test_into_a_pipe(self) -> None:
        """What is written has no position to be written at."""
        reader, writer = os.pipe()
        with open(reader, "rb") as pipe:
            with open(writer, "wb") as file:
                apply_patches(self.file(b"a\nb\n"), [self.file(b"2c\nB\n.\n")], file.fileno())
            self.assertEqual(pipe.read(), b"a\nB\n")

    def test_no_index(self) -> None:
        """An index that cannot be read leaves no thread behind, which would keep the process from its end."""
        for index in (self.directory / "none", self.directory):
            with self.assertRaises(OSError), (self.directory / "out").open("wb") as file:
                apply_patches(str(index), [], file.fileno())
        names = [thread.name for thread in threading.enumerate()]
        self.assertNotIn("pipegrid-patch", names)

    def test_carriage_returns(self) -> None:
        """They end no line; so what is merged with such a line behind it stays in its place."""
        first, second = b"1c\nw\rindows\r\n.\n", b"3d\n2c\nB\n.\n"
        self.assertEqual(self.patched(b"a\nb\nc\nd\n", first, second), b"w\rindows\r\nB\nd\n")

    def test_packed(self) -> None:
        """Index and patches may be packed, in any of four ways."""
        for pack in (gzip.compress, lzma.compress, bz2.compress, zstandard.compress):
            self.assertEqual(self.patched(pack(b"a\nb\n"), pack(b"2c\nc\n.\n")), b"a\nc\n")

    def test_packed_in_parts(self) -> None:
        """Several files of one kind are one, as programs make them that pack with several processors."""
        text = b"".join(b"%d\n" % number for number in range(40_000))
        for pack in (gzip.compress, lzma.compress, bz2.compress, zstandard.compress):
            parts = [pack(text[at : at + 50_000]) for at in range(0, len(text), 50_000)]
            zeros = b"" if pack is zstandard.compress else bytes(512)
            for packed in (b"".join(parts), zeros.join((*parts, b""))):
                patch = pack(b"2c\n") + pack(b"c\n.\n")
                self.assertEqual(self.patched(packed, patch), text.replace(b"1\n", b"c\n", 1))

    def test_the_ends(self) -> None:
        """Before the first line, behind the last, and a last line that has no end."""
        self.assertEqual(self.patched(b"a\n", b"1a\nz\n.\n0a\nx\n.\n"), b"x\na\nz\n")
        self.assertEqual(self.patched(b"", b"0a\nx\n.\n"), b"x\n")
        self.assertEqual(self.patched(b"a\nb", b"2d\n"), b"a\n")
        self.assertEqual(self.patched(b"a\nb\n", b"1,2d\n"), b"")
        self.assertEqual(self.patched(b"a\nb\n", b""), b"a\nb\n")


class MergeTests(SynchronousTestCase):
    """Patches become one list of pieces."""

    def test_what_cancels_out_leaves_nothing(self) -> None:
        """A line that comes and goes is not written, and neighbours are one piece."""
        pieces = merge([[LineEdit(5, 5, [b"x\n"])], [LineEdit(5, 6, [])]])
        self.assertEqual(pieces, merge([]))

    def test_ranges_rise(self) -> None:
        """So one pass is enough."""
        rng = random.Random(3)
        patches = []
        for _ in range(30):
            marks = sorted(rng.sample(range(1000), 20))
            patches.append(
                [
                    LineEdit(a, b, [b"t\n"] * rng.randrange(3))
                    for a, b in zip(marks[::2], marks[1::2], strict=True)
                ]
            )
        at = 0
        for piece in merge(patches):
            if isinstance(piece, tuple):
                self.assertGreaterEqual(piece[0], at)
                self.assertGreater(piece[1], piece[0])
                at = piece[1]


class DamageTests(PatchCase):
    """Whatever is wrong is said in a sentence."""

    def test_bad_patches(self) -> None:
        """No commands, cut off, out of order, for another index."""
        for patch, words in (
            (b"nonsense\n", "no command in line 1"),
            (b"<html>\n", "no command"),
            (b"1c\nx\n", "no end"),
            (b"1c\nx\n.", "is incomplete"),
            (b"1a\n", "no end"),
            (b"1d\n2d\n", "not in order"),
            (b"1,3d\n2d\n", "not in order"),
            (b"3,2d\n", "not in order"),
            (b"0d\n", "not in order"),
            (b"1,2a\nx\n.\n", "appends to a range"),
            (b"1c\nx\n.\ns/.//\n", "removes lines"),
            (b"9d\n", "speaks of line 8"),
            (b"4c\nx\n.\n", "speaks of line 4"),
            (b"9a\nx\n.\n", "speaks of line 9"),
            (b"99999999999999d\n", "no command"),
            (gzip.compress(b"1d\n")[:-4], "is incomplete"),
            (b"\x1f\x8bgarbage", "damaged"),
            (b"\xfd7zXZ\0garbage and more", "damaged"),
        ):
            error = self.assertRaises(PatchError, self.patched, b"a\nb\nc\n", patch)
            self.assertIn(words, str(error))
            self.assertTrue(str(error).isprintable(), error)

    def test_many_large_ones(self) -> None:
        """Patches are bounded together, too, as they are merged in memory."""
        patch = b"1c\n" + b"x" * 100 + b"\n.\n"
        with mock.patch.object(pdiff, "MAX_ALL_PATCHES_BYTES", 2 * len(patch)):
            self.patched(b"a\n", patch, patch)
            error = self.assertRaises(PatchError, self.patched, b"a\n", patch, patch, patch)
        self.assertIn("together; fetch the index again", str(error))

    def test_many_small_lines(self) -> None:
        """What counts is what patches become: lines, edits, and the steps of merging them."""
        patch = b"1c\na\nb\n.\n"
        for name, module, most in (
            ("MAX_PATCH_LINES", pdiff, 8),
            ("MAX_EDITS", pdiff, 2),
            ("MAX_STEPS", pdiff, 5),
        ):
            with mock.patch.object(module, name, most):
                self.patched(b"a\n", patch, patch)
                error = self.assertRaises(PatchError, self.patched, b"a\n", patch, patch, patch)
            self.assertIn("fetch the index again", str(error))

    def test_one_line_after_the_other(self) -> None:
        """Taking a long text apart line by line takes time with its length, and not with its square."""
        count = 100_000
        first = parse(b"0a\n" + b"ab\n" * count + b".\n", "it")
        second = parse(b"".join(b"%dd\n" % line for line in range(count - 1, 0, -2)), "it")
        begun = time.process_time()
        text, rest = merge([first, second])
        self.assertLess(time.process_time() - begun, 3)  # it is 0.05 s, and was 10 s
        self.assertEqual((len(text), rest), (count // 2, (0, pdiff.END)))

    def test_cut_off(self) -> None:
        """Whatever it is packed with, and wherever: what is left is not taken for all of it."""
        text = random.Random(5).randbytes(300_000)
        with_sum = zstandard.ZstdCompressor(write_checksum=True).compress
        no_size = zstandard.ZstdCompressor(write_content_size=False).compress
        packs = (gzip.compress, lzma.compress, bz2.compress, zstandard.compress, with_sum, no_size)
        for pack in packs:
            packed = pack(text)
            self.assertEqual(self.patched(packed), text)
            self.assertEqual(self.patched(packed + pack(bytes(9))), text + bytes(9))
            for cut in (packed[:-1], packed[:-5], packed[:150_000], packed + packed[:-1]):
                error = self.assertRaises(PatchError, self.patched, cut)
                self.assertIn("is incomplete", str(error))
            error = self.assertRaises(PatchError, self.patched, packed + b"no such thing")
            self.assertIn("is damaged", str(error))
        skipped = b"\x50\x2a\x4d\x18" + (100).to_bytes(4, "little") + bytes(100)
        packed = zstandard.compress(text)
        self.assertEqual(self.patched(packed + skipped + packed), text * 2)
        self.assertEqual(self.patched(packed + skipped), text)
        self.assertEqual(self.patched(skipped + packed), text)  # as pzstd packs
        for cut in (skipped[:-1], skipped[:5], packed[:3], packed[:7]):
            self.assertRaises(PatchError, self.patched, packed + cut)

    def test_bombs(self) -> None:
        """A patch that unpacks to more than one may have is given up before it is held."""
        self.patch(pdiff, "MAX_PATCH_BYTES", 1 << 20)
        for pack in (gzip.compress, lzma.compress, bz2.compress, zstandard.compress):
            error = self.assertRaises(PatchError, self.patched, b"a\n", pack(bytes(64 << 20)))
            self.assertIn("larger", str(error))

    @given(
        st.binary(max_size=40)
        | st.lists(st.sampled_from((*LINES, b"1a\n", b"2c\n", b"1,2d\n"))).map(b"".join)
    )
    @settings(max_examples=300, deadline=None, derandomize=True)
    def test_anything(self, patch: bytes) -> None:
        """A script is read or refused."""
        try:
            edits = parse(patch, "it")
        except PatchError:
            return
        at = 0
        for edit in edits:
            self.assertTrue(at <= edit.first <= edit.last)
            at = edit.last


class CommandTests(PatchCase):
    """``pipegrid pdiff``."""

    def run_command(self, *arguments: str) -> tuple[int, str, str]:
        """Run it; returns status, stdout, stderr."""
        out, err = io.BytesIO(), io.StringIO()
        done = start(["pdiff", *arguments], Console(io.BytesIO(), out, err), Clock())
        return self.successResultOf(done), out.getvalue().decode(), err.getvalue()

    def test_it(self) -> None:
        """The result is there if its hash is right, and else nothing is."""
        index, patch = self.file(b"a\nb\n"), self.file(b"2d\n")
        out = str(self.directory / "new")
        digest = sha256(b"a\n").hexdigest()
        status, told, _ = self.run_command(index, patch, "-o", out, "--sha256", digest.upper())
        self.assertEqual((status, told), (0, f"{digest}  2  {out}\n"))
        self.assertEqual(Path(out).read_bytes(), b"a\n")
        os.unlink(out)
        status, told, error = self.run_command(index, patch, "-o", out, "--sha256", "0" * 64)
        self.assertEqual((status, told), (1, ""))
        self.assertIn("another SHA-256", error)
        self.assertFalse(os.path.exists(out))

    def test_wrong_input(self) -> None:
        """One sentence each."""
        index, patch = self.file(b"a\nb\n"), self.file(b"7d\n")
        out = str(self.directory / "new")
        for arguments, words in (
            ((index, patch, "-o", out), "not for"),
            (("nowhere", patch, "-o", out), "nowhere"),
            ((index, "nowhere", "-o", out), "nowhere"),
            ((index, "-o", out), "PATCH"),
            ((index, patch), "-o"),
            ((index, patch, "-o", out, "--sha256", "12"), "64 hexadecimal digits"),
            ((index, patch, "-o", index), "exists already"),
        ):
            status, told, error = self.run_command(*arguments)
            self.assertIn(status, (1, 2))
            self.assertEqual((told, error.count("\n")), ("", 1), error)
            self.assertIn(words, error)
            self.assertEqual(sorted(os.listdir(self.directory)), ["file1", "file2"])

    def test_disks_that_fail(self) -> None:
        """It is said which file could not be written, or read, and nothing is left of the result."""
        index, patch = self.file(b"a\nb\n"), self.file(b"2d\n")
        out = str(self.directory / "new")
        with mock.patch.object(os, "writev", side_effect=OSError(errno.ENOSPC, "full")):
            status, told, error = self.run_command(index, patch, "-o", out)
        self.assertEqual((status, told), (1, ""))
        self.assertEqual(
            error,
            f"pipegrid: cannot write {out}: full; free some space or choose another place\n",
        )

        class Failing(io.FileIO):
            """A file on a disk that fails."""

            def readinto(self, page: Any) -> int:
                """Fail."""
                raise OSError(errno.EIO, "the disk failed")

        with mock.patch.object(decompression, "FileIO", Failing):
            status, told, error = self.run_command(index, patch, "-o", out)
        self.assertEqual((status, told, error), (1, "", f"pipegrid: {index}: the disk failed\n"))
        self.assertEqual(sorted(os.listdir(self.directory)), ["file1", "file2"])
