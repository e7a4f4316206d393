"""
The file of ``-o``, which appears under its name only when it is complete.

``get`` resumes from the part file of an interrupted one (``disk.part_file``), and reports that.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from pipegrid.cli.console import Console
from pipegrid.core.text import amount
from pipegrid.disk.part_file import PartFile
from pipegrid.transfer.results import GetResult
from pipegrid.tree import local_directory_descriptor

Say = Callable[[str], object]


class OutputFile:
    """
    A context manager; ``file`` takes the bytes, and leaving it without an error gives the file its name.

    Args:
        path: of the file. A device or pipe there is written to directly.
        force: replace an existing file.
        resume: resume from the part file of an interrupted command, and leave one if this is interrupted.
        say: gets a sentence about a part file.
        home: the open directory of the path: nothing is written outside it, even if it is replaced
            meanwhile.

    Raises:
        SinkError: the file exists and may not be replaced, or cannot be written.
    """

    def __init__(
        self,
        path: str,
        force: bool = False,
        *,
        resume: bool = False,
        say: Say | None = None,
        home: local_directory_descriptor.DirectoryFd | None = None,
    ) -> None:
        self.file = (
            PartFile(path, force, resume)
            if home is None
            else local_directory_descriptor.DirectoryPartFile(home, path, force, keeps_mode=True)
        )
        self._say = say or (lambda text: None)
        if self.file.found_bytes and self.file.part is not None:
            name, found = os.path.basename(self.file.part), amount(self.file.found_bytes)
            self._say(
                f"{name} holds {found} from an earlier get; checking them, to fetch only the rest"
            )

    def report_misfit(self, result: GetResult) -> None:
        """Report a part file that did not fit."""
        if result.found_bytes and not result.here_bytes:
            self._say("the part file of an earlier get did not fit, and was overwritten")
        elif result.here_bytes:
            fetched = amount(result.size - result.here_bytes)
            self._say(f"{amount(result.here_bytes)} were present, {fetched} were fetched")

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.file.publish()
        finally:
            part = self.file.leave()
            if part is not None:
                if not os.path.dirname(part):
                    part = os.path.join(os.path.dirname(self.file.path), part)
                self._say(
                    f"what was fetched is kept in {part}; the same command resumes from there"
                )


def resumable(
    console: Console,
    path: str,
    force: bool,
    home: local_directory_descriptor.DirectoryFd | None = None,
) -> OutputFile:
    """Return the output of a file that the next command resumes if this one is interrupted."""
    return OutputFile(path, force, resume=True, say=console.note, home=home)
