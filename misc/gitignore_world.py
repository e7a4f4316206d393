"""
Do patterns decide as git does? Random trees and sets of patterns, each compared with `git check-ignore`.

    python -m misc.gitignore_world [--trees 2000] [--seed SEED]

Each tree is made on the disk, with directories, files and links to directories; git gets the patterns as
``core.excludesFile`` and answers for all entries in one process. Compared are the verdict about each entry
and the line of the pattern that decides it. Patterns are made of pieces of the tree's names, of all
wildcards, and of what is malformed. The last line counts; the exit status is 1 if they differ.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import attrs

from pipegrid.tree.ignore_patterns import IgnorePatterns, patterns_of

LETTERS = [b"a", b"b", b"ab", b"ba", b"aab", b"x.o", b"a.o", b"b-1", b"B"]
ODD = [
    b"\xc3\xa9",
    b"\xe9",
    b"!a",
    b"#b",
    b"a b",
    b"a ",
    b"[a]",
    b"*",
    b"\\a",
    b"a\\",
    b"?",
    b"]",
    b"^",
    b"{a}",
]
PIECES = [
    *(
        b"*",
        b"**",
        b"***",
        b"?",
        b"a",
        b"b",
        b"ab",
        b"/",
        b"/",
        b"/**",
        b"**/",
        b"/**/",
        b"*.o",
        b"\\",
    ),
    *(
        b"[ab]",
        b"[!a]",
        b"[^b]",
        b"[a-z]",
        b"[z-a]",
        b"[]]",
        b"[]-a]",
        b"[!]]",
        b"[a",
        b"[",
        b"]",
        b"[\\]]",
    ),
    *(
        b"[[:alpha:]]",
        b"[[:upper:][:digit:]]",
        b"[[:no:]]",
        b"[[:alpha]",
        b"[[:a-]",
        b"[a-\\b]",
        b"[-a]",
    ),
    *(
        b"[a-]",
        b"\\*",
        b"\\a",
        b"\\/",
        b"\\ ",
        b" ",
        b"!",
        b"#",
        b".",
        b"\xc3\xa9",
        b"\xc3",
        b"-",
        b"[!-a]",
    ),
    *(
        b"[[:space:][:punct:]]",
        b"[a-[:digit:]]",
        b"[[:digit:]-z]",
        b"[a-c-e]",
        b"[/]",
        b"[.-0]",
        b"[!/]",
    ),
]


@attrs.frozen
class Difference:
    """
    An entry about which the two do not agree.

    Attributes:
        git, ours: the line of the deciding pattern; 0: none matches.
    """

    patterns: bytes
    path: bytes
    git: int
    ours: int


class World:
    """One random tree, and a set of patterns for it."""

    def __init__(self, random: Random, root: bytes) -> None:
        self._random = random
        self.root = root
        self.entries: list[tuple[bytes, bool]] = []
        self._names = LETTERS + (ODD if random.random() < 0.4 else [])
        os.mkdir(root)
        self._fill(b"", 0)
        lines = [self._pattern() for _ in range(random.randint(1, 8))]
        self.patterns = random.choice([b"", b"", b"", b"\xef\xbb\xbf"]) + b"".join(lines)
        if random.random() < 0.2:
            self.patterns = self.patterns.removesuffix(b"\n")

    def _fill(self, above: bytes, depth: int) -> None:
        names = self._random.sample(self._names, self._random.randint(1, 4 if depth else 5))
        for name in names:
            path = above + name
            full = os.path.join(self.root, path)
            kind = self._random.random()
            if kind < 0.5 and depth < 4:
                os.mkdir(full)
                self.entries.append((path, True))
                if len(self.entries) < 25:
                    self._fill(path + b"/", depth + 1)
            elif kind < 0.6:
                os.symlink(".", full)
                self.entries.append((path, False))
            else:
                os.close(os.open(full, os.O_CREAT | os.O_WRONLY))
                self.entries.append((path, False))

    def _pattern(self) -> bytes:
        random = self._random
        how = random.random()
        if how < 0.35:  # of a path, with some of it replaced
            path, _ = random.choice(self.entries)
            parts = path.split(b"/")[random.choice((0, 0, 0, 1)) :]
            text = b"/".join(self._changed(part) for part in parts)
        elif how < 0.5:
            text = self._changed(random.choice(self._names))
        else:
            text = b"".join(
                random.choice(PIECES if random.random() < 0.6 else self._names)
                for _ in range(random.randint(1, 6))
            )
        text = random.choice((b"", b"", b"", b"/", b"**/", b"#")) + text
        text = random.choice((b"", b"", b"!")) + text
        text += random.choice(
            (b"", b"", b"", b"/", b"/", b"/*", b"/**", b" ", b"  ", b"\\ ", b"\\", b"**")
        )
        return text + random.choice((b"\n", b"\n", b"\n", b"\r\n", b"\n\n"))

    def _changed(self, name: bytes) -> bytes:
        random = self._random
        how = random.random()
        if how < 0.4 or not name:
            return name
        if how < 0.6:
            return random.choice((b"*", b"**", b"?", b"[!b]*", b"*" + name[-1:], name[:1] + b"*"))
        at = random.randrange(len(name))
        return name[:at] + random.choice(PIECES) + name[at + random.randint(0, 1) :]

    def differences(self, repository: str) -> list[Difference]:
        """Ask git about all entries, and compare."""
        listed = Path(repository, "patterns")
        listed.write_bytes(self.patterns)
        asked = b"".join(path + b"\0" for path, _ in self.entries)
        command = ["git", f"--git-dir={repository}", f"--work-tree={os.fsdecode(self.root)}"]
        command += ["-c", f"core.excludesFile={listed}", "check-ignore"]
        done = subprocess.run(
            [*command, "--no-index", "--stdin", "-z", "-v", "-n"],
            input=asked,
            capture_output=True,
            cwd=self.root,
            check=False,
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stderr.decode("utf-8", "replace"))
        said = done.stdout.split(b"\0")
        fields = iter(said[:-1])
        git = {path: int(line or 0) for _, line, _, path in zip(*[fields] * 4, strict=True)}
        ours = self._decided()
        return [
            Difference(self.patterns, path, git[path], ours[path])
            for path, _ in self.entries
            if git[path] != ours[path]
        ]

    def _decided(self) -> dict[bytes, int]:
        """Return the line that decides about each entry, as a walk would find it."""
        numbered = patterns_of(self.patterns)
        patterns = IgnorePatterns([pattern for _, pattern in numbered])
        found: dict[bytes, int] = {}
        excluded: dict[bytes, int] = {}
        for path, is_directory in self.entries:
            above = path.rpartition(b"/")[0]
            if above in excluded:
                number = excluded[above]
            else:
                deciding = patterns.deciding(path, is_directory)
                number = 0 if deciding is None else numbered[deciding][0]
            found[path] = number
            is_out = above in excluded or patterns.leaves_out(path, is_directory)
            if is_directory and is_out:
                excluded[path] = number
        return found


def compare(trees: int, seed: int) -> tuple[int, int, list[Difference]]:
    """Compare random trees; returns how many entries and patterned ones there were, and the differences."""
    entries = decided = 0
    different: list[Difference] = []
    with tempfile.TemporaryDirectory(prefix="pg") as place:
        repository = os.path.join(place, "repository")
        subprocess.run(["git", "init", "-q", "--bare", repository], check=True)
        for number in range(trees):
            root = os.path.join(os.fsencode(place), b"tree")
            world = World(Random(f"{seed} {number}"), root)
            different += world.differences(repository)
            entries += len(world.entries)
            decided += sum(1 for line in world._decided().values() if line)
            shutil.rmtree(root)
    return entries, decided, different


def main() -> int:
    """Compare, and print what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trees", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=Random().randrange(1 << 32))
    options = parser.parse_args()
    entries, decided, different = compare(options.trees, options.seed)
    for each in different[:20]:
        print(f"{each.path!r}: git: line {each.git}, here: line {each.ours}, of {each.patterns!r}")
    print(
        f"seed {options.seed}: {options.trees} trees with {entries} entries, {decided} of them decided by a "
        f"pattern; {len(different)} differences"
    )
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
