"""``pipegrid encode`` and ``pipegrid decode``: between files and share files, with no grid."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.core.caps import ChkCap, parse_cap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import SourceError
from pipegrid.grid.client_creation import create_local
from pipegrid.transfer import offline_encoding
from pipegrid.transfer.offline_encoding import encode_file, open_share
from tests.cli.support import Run
from tests.vectors import load, plaintext

DATA = bytes(range(256)) * 3


class OfflineTestCase(SynchronousTestCase):
    """A scratch directory with one file in it."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        nowhere = str(self.directory / "nowhere")
        self.patch(os, "environ", {**os.environ, "PIPEGRID_DIR": nowhere})
        self.file = self.directory / "file"
        self.file.write_bytes(DATA)
        self.shares = self.directory / "shares"
        self.output = self.directory / "output"

    def encode(self, *arguments: str) -> Run:
        return Run("encode", str(self.file), "--shares", str(self.shares), *arguments)

    def encoded(self, *arguments: str) -> str:
        """Encode the file and return its cap."""
        run = self.encode(*arguments)
        self.assertEqual(self.successResultOf(run.finished), 0, run.stderr)
        return run.stdout.strip()

    def decode(self, cap: str, *files: str | Path, options: tuple[str, ...] = ()) -> Run:
        return Run("decode", cap, *map(str, files), "-o", str(self.output), *options)

    def share(self, number: int) -> Path:
        return self.shares / str(number)


class LargeSegmentTests(OfflineTestCase):
    """A stranger's file may want more memory than anybody meant to give."""

    def test_a_bound_that_can_be_lifted(self) -> None:
        """The sentence says how; a file of one short segment is none of those."""
        cap = self.encoded("--segment-size", "1TB", "-k", "1", "-n", "1")
        self.assertEqual(self.successResultOf(self.decode(cap, self.share(0)).finished), 0)
        self.output.unlink()
        self.file.write_bytes(bytes((16 << 20) + 1))
        cap = self.encoded("--segment-size", "20MiB", "-k", "1", "-n", "1", "-f")
        run = self.decode(cap, self.share(0))
        self.assertEqual(self.successResultOf(run.finished), 2)
        self.assertIn("--max-segment 17MiB", run.stderr)
        self.assertEqual(run.stderr.count("\n"), 1)
        self.assertFalse(self.output.exists())
        run = self.decode(cap, self.share(0), options=("--max-segment", "17MiB"))
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(self.output.stat().st_size, (16 << 20) + 1)


class EncodeTests(OfflineTestCase):
    """A file becomes share files."""

    def test_recorded_vectors(self) -> None:
        """Shares and caps are those of the reference implementation, byte for byte."""
        cases = [
            case
            for case in load("immutable")["cases"]
            if case["format"] == "chk"
            and case["convergence"] is not None
            and case["share_layout_version"] == 1
            and len(plaintext(case["plaintext"])) < 200_000
        ]
        self.assertGreater(len(cases), 20)
        for case in cases:
            self.file.write_bytes(plaintext(case["plaintext"]))
            cap = self.encoded(
                *("-k", str(case["k"]), "-n", str(case["n"]), "--force"),
                *("--segment-size", str(case["max_segment_size"])),
                *("--convergence", base32.encode(bytes.fromhex(case["convergence"]))),
            )
            self.assertEqual(cap, case["cap"], case["name"])
            for number, digest in enumerate(case["share_sha256"]):
                share = self.share(number).read_bytes()
                self.assertEqual(hashlib.sha256(share).hexdigest(), digest, case["name"])

    def test_json(self) -> None:
        """The cap, and the files in share order."""
        run = self.encode("--json", "--convergence", "")
        self.assertEqual(self.successResultOf(run.finished), 0)
        (fields,) = run.objects
        self.assertEqual(sorted(fields), ["cap", "path", "share_bytes", "shares", "size"])
        self.assertEqual(fields["shares"], [str(self.share(number)) for number in range(10)])
        self.assertEqual(fields["share_bytes"], self.share(0).stat().st_size)
        self.assertEqual(fields["size"], len(DATA))

    def test_small_files_have_no_shares(self) -> None:
        """The cap holds them; stderr says so."""
        self.file.write_bytes(b"tiny")
        run = self.encode("--convergence", "")
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertIn("no shares", run.stderr)
        self.assertFalse(self.shares.exists())
        self.assertEqual(self.successResultOf(self.decode(run.stdout.strip()).finished), 0)
        self.assertEqual(self.output.read_bytes(), b"tiny")

    def test_random_keys_differ(self) -> None:
        """Two encodings under random keys have nothing in common."""
        self.assertNotEqual(self.encoded("--random-key"), self.encoded("--random-key", "--force"))

    def test_the_clients_directory_gives_defaults(self) -> None:
        """Its secret and parameters are those that put would use; without one the key is random."""
        self.assertNotEqual(self.encoded(), self.encoded("--force"))
        directory = str(self.directory / "client")
        config = create_local(directory, params=Params(2, 5, 100), happy=3)
        secret = base32.encode(config.convergence)
        self.assertEqual(
            self.encoded("-d", directory, "--force"),
            self.encoded(
                *("-k", "2", "-n", "5", "--segment-size", "100"),
                *("--convergence", secret, "--force"),
            ),
        )

    def test_other_shares_are_not_mixed_in(self) -> None:
        """A directory that holds shares is refused, and left as it is."""
        self.encoded("--convergence", "")
        before = {path: path.read_bytes() for path in self.shares.iterdir()}
        self.file.write_bytes(DATA * 2)
        run = self.encode("--convergence", "")
        self.assertEqual(self.successResultOf(run.finished), 1)
        self.assertIn("holds shares already", run.stderr)
        self.assertEqual({path: path.read_bytes() for path in self.shares.iterdir()}, before)

    def test_failures_leave_no_share(self) -> None:
        """A file that cannot be read gets its sentence and no share files."""
        self.file.unlink()
        run = self.encode("--convergence", "")
        self.assertEqual(self.successResultOf(run.finished), 1)
        self.assertIn(str(self.file), run.stderr)
        self.assertEqual(run.stdout, "")

    def test_a_file_that_changes_meanwhile_is_noticed(self) -> None:
        """Shares under the wrong key are never written."""
        self.file.write_bytes(DATA * 100)

        def change(done: int, total: int) -> None:
            with open(self.file, "r+b") as file:
                file.seek(total - 1)
                file.write(b"!")

        with self.assertRaises(SourceError):
            params = Params(3, 10, 1000)
            encode_file(str(self.file), str(self.shares), params, b"", progress=change)
        self.assertEqual(os.listdir(self.shares), [])


class DecodeTests(OfflineTestCase):
    """Share files become the file."""

    def setUp(self) -> None:
        super().setUp()
        self.cap = self.encoded("--convergence", "", "--segment-size", "100")

    def assert_restored(self, run: Run) -> None:
        self.assertEqual(self.successResultOf(run.finished), 0, run.stderr)
        self.assertEqual(self.output.read_bytes(), DATA)
        self.output.unlink()

    def test_a_cap_file_with_a_damaged_line(self) -> None:
        """The line is named, and the file of the other one restored; without another nothing is."""
        cap = self.cap
        caps = self.directory / "caps"
        caps.write_text(f"{cap[:-3]}\n{cap}\n")
        run = Run("decode", "--cap-file", str(caps), str(self.shares), "-o", str(self.output))
        self.assertEqual(self.successResultOf(run.finished), 1, run.stderr)
        self.assertIn("caps:1", run.stderr)
        self.assertEqual(self.output.read_bytes(), DATA)
        caps.write_text(f"{cap[:-3]}\n")
        again = self.directory / "again"
        run = Run("decode", "--cap-file", str(caps), str(self.shares), "-o", str(again))
        self.assertEqual(self.successResultOf(run.finished), 2, run.stderr)
        self.assertIn("caps:1", run.stderr)
        self.assertFalse(again.exists())

    def test_any_three_of_ten(self) -> None:
        """Which ones does not matter."""
        for numbers in ((0, 1, 2), (7, 8, 9), (9, 0, 4)):
            self.assert_restored(self.decode(self.cap, *map(self.share, numbers)))

    def test_names_do_not_matter(self) -> None:
        """A share says itself which one it is, even against its file's name."""
        self.share(3).rename(self.directory / "5")
        self.share(4).rename(self.directory / "holiday.jpg")
        run = self.decode(
            self.cap, self.directory / "5", self.directory / "holiday.jpg", self.share(5)
        )
        self.assert_restored(run)

    def test_every_share_knows_its_number(self) -> None:
        """For any k and n, also where all shares have equal blocks."""
        for k, n in ((1, 1), (1, 2), (1, 5), (2, 3), (7, 7), (3, 33)):
            cap = parse_cap(self.encoded("--force", "-k", str(k), "-n", str(n), "--random-key"))
            assert isinstance(cap, ChkCap)
            for number in range(n):
                hidden = self.directory / "hidden"
                hidden.write_bytes(self.share(number).read_bytes())
                found = open_share(str(hidden), cap)
                found.close()
                if k > 1:
                    self.assertEqual(found.share_number, number, (k, n))
                found = open_share(str(self.share(number)), cap)
                found.close()
                self.assertEqual(found.share_number, number, (k, n))

    def test_containers_of_a_storage_server(self) -> None:
        """Files from a storage directory do as well as bare shares."""
        for number in (1, 6):
            share = self.share(number).read_bytes()
            container = struct.pack(">LLL", 2, len(share), 1) + share + bytes(72)
            self.share(number).write_bytes(container)
        self.assert_restored(self.decode(self.cap, *map(self.share, (1, 6, 8))))

    def test_bad_files_are_named_and_left_out(self) -> None:
        """Damage, another file's share, no share at all, no file at all."""
        damaged = bytearray(self.share(0).read_bytes())
        damaged[40] ^= 1
        self.share(0).write_bytes(damaged)
        truncated = self.share(1).read_bytes()
        self.share(1).write_bytes(truncated[: len(truncated) // 2])
        self.share(2).write_bytes(b"")
        missing = self.directory / "missing"
        files = [self.file, missing, *map(self.share, (0, 1, 2, 3, 4, 5))]
        run = self.decode(self.cap, *files, options=("--json",))
        (fields,) = run.objects
        self.assertEqual(sorted(fields["shares_used"]), ["3", "4", "5"])
        blamed = {problem["server"] for problem in fields["corrupt"]}
        self.assertEqual(
            blamed, {str(path) for path in (self.file, missing, *map(self.share, (0, 1, 2)))}
        )
        for path in blamed:
            self.assertIn(path, run.stderr)
        self.assert_restored(run)

    def fill_disks(self, files: int) -> Path:
        """Return a directory with the disks of three servers, which hold many files' shares beside ours."""
        disks = self.directory / "disks"
        index = self.storage_index()
        for number in range(3):
            shares = disks / f"0{number}" / "shares"
            for other in range(files):
                name = base32.encode(hashlib.sha256(b"%d" % other).digest()[:16])
                home = shares / name[:2] / name
                home.mkdir(parents=True)
                (home / str(number)).write_bytes(b"another file's share")
            (shares / index[:2] / index).mkdir(parents=True)
            (shares / index[:2] / index / str(number)).write_bytes(self.share(number).read_bytes())
        return disks

    def storage_index(self) -> str:
        run = Run("storage-index", self.cap)
        self.assertEqual(self.successResultOf(run.finished), 0)
        return run.stdout.strip()

    def test_its_own_among_many(self) -> None:
        """The file's directory is found on each disk; what lies elsewhere is not even opened."""
        disks = self.fill_disks(500)
        for places in ([disks], [disks / "00", disks / "01" / "shares", disks / "02"]):
            run = self.decode(self.cap, *places)
            self.assert_restored(run)
            self.assertEqual(run.stderr, "")
        run = self.decode(self.cap, *disks.glob("*/shares/*/*/*"))
        self.assert_restored(run)
        left_out = "1500 files left out, since their directory is that of another storage index"
        self.assertEqual(run.stderr, f"pipegrid: {left_out} than {self.storage_index()}\n")

    def test_a_directory_of_encode(self) -> None:
        """Its numbered files are shares; what else is in it is not looked at."""
        (self.shares / "notes").write_text("mine")
        run = self.decode(self.cap, self.shares)
        self.assert_restored(run)
        self.assertEqual(run.stderr, "")

    def test_eight_levels(self) -> None:
        """So deep is looked, and no deeper."""
        index = self.storage_index()
        for levels, status in ((7, 0), (8, 4)):
            top = self.directory / f"top{levels}"
            home = top.joinpath(*["d"] * levels, index)
            home.mkdir(parents=True)
            for number in range(3):
                (home / str(number)).write_bytes(self.share(number).read_bytes())
            run = self.decode(self.cap, top, options=("--force",))
            self.assertEqual(self.successResultOf(run.finished), status, run.stderr)

    def test_directories_without_end(self) -> None:
        """Links in a circle are not followed, depth and number are bounded."""
        disks = self.fill_disks(3)
        (disks / "00" / "loop").symlink_to(disks)
        deep = disks.joinpath(*["d"] * 40)
        deep.mkdir(parents=True)
        self.assert_restored(self.decode(self.cap, disks))
        self.patch(offline_encoding, "MAX_ENTRIES", 5)
        run = self.decode(self.cap, disks)
        self.assertEqual(self.successResultOf(run.finished), 2)
        self.assertIn("name the storage directories themselves", run.stderr)
        self.assertFalse(self.output.exists())

    def test_ten_thousand_that_do_not_belong(self) -> None:
        """A screen of them is named, the rest counted; -v names all."""
        others = [self.directory / f"x{number}" for number in range(100)]
        for path in others:
            path.write_bytes(b"no share")
        run = self.decode(self.cap, *others, *map(self.share, range(3)))
        self.assert_restored(run)
        self.assertEqual(run.stderr.count("\n"), 20)
        self.assertIn("and 81 more like that; -v names them", run.stderr)
        verbose = self.decode(self.cap, *others, *map(self.share, range(3)), options=("-v",))
        self.assert_restored(verbose)
        self.assertEqual(verbose.stderr.count("is not a share of this file"), 100)

    def test_a_second_copy_helps_a_damaged_one(self) -> None:
        """Where one file of a share number is damaged, another of the same number is used."""
        copy = self.directory / "copy"
        copy.write_bytes(self.share(0).read_bytes())
        damaged = bytearray(self.share(0).read_bytes())
        damaged[40] ^= 1
        self.share(0).write_bytes(damaged)
        self.assert_restored(self.decode(self.cap, *map(self.share, (0, 1, 2)), copy))

    def test_shares_that_are_each_damaged_elsewhere_suffice(self) -> None:
        """Four shares, all damaged, but in different segments: their good blocks are used."""
        for number in (0, 1, 2, 3):
            damaged = bytearray(self.share(number).read_bytes())
            damaged[36 + number * 34] ^= 1  # blocks are 34 bytes long, from byte 36 on
            self.share(number).write_bytes(damaged)
        run = self.decode(self.cap, *map(self.share, (0, 1, 2, 3)))
        self.assertGreater(run.stderr.count("is damaged at byte"), 1, run.stderr)
        self.assert_restored(run)

    def test_too_few_shares_is_4_and_writes_nothing(self) -> None:
        """Two shares, twice each, are still two."""
        copy = self.directory / "copy"
        copy.write_bytes(self.share(0).read_bytes())
        run = self.decode(self.cap, self.share(0), self.share(1), copy)
        self.assertEqual(self.successResultOf(run.finished), 4)
        self.assertIn("only 2 good shares", run.stderr)
        self.assertFalse(self.output.exists())

    def test_an_existing_file_stays(self) -> None:
        """Without --force."""
        self.output.write_bytes(b"precious")
        run = self.decode(self.cap, *map(self.share, (0, 1, 2)))
        self.assertEqual(self.successResultOf(run.finished), 1)
        self.assertEqual(self.output.read_bytes(), b"precious")

    def test_standard_output(self) -> None:
        """``-o -`` is for pipes."""
        files = [str(self.share(number)) for number in (2, 4, 6)]
        run = Run("decode", self.cap, *files, "-o", "-")
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(run.raw.getvalue(), DATA)

    def test_no_flipped_bit_gives_wrong_bytes(self) -> None:
        """Any damage to one of three shares is found, or does no harm."""
        original = self.share(1).read_bytes()
        for position in range(0, len(original), 17):
            damaged = bytearray(original)
            damaged[position] ^= 1 << position % 8
            self.share(1).write_bytes(damaged)
            run = self.decode(self.cap, *map(self.share, (0, 1, 2)), options=("--force",))
            status = self.successResultOf(run.finished)
            self.assertIn(status, (0, 4), (position, run.stderr))
            if status == 0:
                self.assertEqual(self.output.read_bytes(), DATA)
