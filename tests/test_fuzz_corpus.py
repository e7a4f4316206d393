"""
What fuzzing once found stays found: every kept input keeps the promises of its target.

A target is a function of bytes, in ``misc/fuzz``; here it runs without a fuzzer. ``docs/how-to-fuzz.md``
tells how inputs get here.
"""

from __future__ import annotations

from pathlib import Path

from misc import fuzz
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.decoder import Decoder
from pipegrid.core.mutable import decoder, directory_content_edits
from pipegrid.core.mutable.directory_content_edits import LazyEntry, pack_entries
from pipegrid.core.mutable.keys import VerifyingKey
from pipegrid.core.segment_decoding import Block
from pipegrid.core.share_verifier import ShareVerifier
from pipegrid.http11.response_parser import ResponseParser
from pipegrid.server.gbs.http_connection import ReadBuffer


def kept(target: str) -> list[Path]:
    """Return the files that are kept for a target."""
    return sorted((fuzz.CORPUS / target).iterdir())


def replay(target: str, data: bytes, name: str) -> None:
    """Run a target once; what it raises says on which input."""
    run = fuzz.load(target)
    try:
        run(data)
    except Exception as error:
        raise AssertionError(f"{name} makes the target {target} fail: {error!r}") from error


class CorpusTests(SynchronousTestCase):
    """All targets, on all that is kept for them."""

    def test_the_corpus_is_small(self) -> None:
        """A few small files a target, and none for targets that do not exist."""
        self.assertEqual({path.name for path in fuzz.CORPUS.iterdir()}, set(fuzz.TARGETS))
        for target in fuzz.TARGETS:
            files = kept(target)
            self.assertTrue(0 < len(files) <= fuzz.MAX_CORPUS_FILES, f"{target}: {len(files)}")
            for path in files:
                self.assertLessEqual(path.stat().st_size, fuzz.MAX_INPUT_BYTES, path)

    def test_kept_inputs_keep_the_promises(self) -> None:
        """No input that is kept makes its target fail."""
        for target in fuzz.TARGETS:
            for path in kept(target):
                replay(target, path.read_bytes(), str(path))

    def test_seeds_are_good(self) -> None:
        """A search starts from inputs that keep all promises; so does the empty one."""
        for target in fuzz.TARGETS:
            for name, data in {"empty": b"", **fuzz.seeds(target)}.items():
                self.assertLessEqual(len(data), fuzz.MAX_INPUT_BYTES)
                replay(target, data, f"seed {name} of {target}")

    def test_broken_readers_are_noticed(self) -> None:
        """With a check left out, some input makes its target fail: the promises are not idle."""
        broken: list[tuple[str, object, str, object]] = [
            ("shares", Block, "is_good", lambda self: True),
            ("shares", Decoder, "_check_end", lambda *_: None),
            ("shares", ShareVerifier, "_check_chain", lambda *_: None),
            ("shares", ShareVerifier, "_check_crypttext_tree", lambda *_: None),
            ("mutable", Block, "is_good", lambda self: True),
            ("mutable", VerifyingKey, "is_signature", lambda *_: True),
            ("mutable", decoder, "prove_leaf", lambda chain, *_: chain[-32:]),
            ("directories", directory_content_edits, "pack_entries", drop_the_odd),
            ("responses", ResponseParser, "_feed_by_lines", lambda self, data: self.error),
            ("requests", ReadBuffer, "read_on", lambda *_: None),
        ]
        for target, where, name, instead in broken:
            inputs = [path.read_bytes() for path in kept(target)] + list(
                fuzz.seeds(target).values()
            )
            patched = self.patch(where, name, instead)
            failures = sum(not keeps_promises(target, data) for data in inputs)
            patched.restore()
            self.assertGreater(failures, 0, f"nobody misses {name}")


def drop_the_odd(entries: dict[str, LazyEntry]) -> bytes:
    """Pack a directory as other programs do: without what they do not understand."""
    return pack_entries({n: entry for n, entry in entries.items() if entry.metadata is not None})


def keeps_promises(target: str, data: bytes) -> bool:
    """Return whether a target accepts what became of an input."""
    try:
        fuzz.load(target)(data)
    except Exception:
        return False
    return True
