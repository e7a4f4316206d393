"""
The output file of ``-o``, which appears under its name only when it is complete.

An interrupted ``get`` leaves a part file (``disk.part_file``); the next one resumes from it, and reports
that.
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
    A context manager: ``file`` takes the bytes, and gets its name when the context is left without an error.

    Args:
        path: the path of the file; a device or pipe is written to directly.
        force: whether to replace an existing file.
        resume: whether to resume from a part file, and to leave one if this command is interrupted.
        say: is called with a sentence about a part file.
        home: the open directory of ``path``; if another directory gets its path meanwhile, no file is written
            there.

    Raises:
        SinkError: the file exists and must not be replaced, or cannot be written.
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
        """Report whether the part file of an earlier ``get`` was used; report nothing if there was none."""
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
    """Return an output file that the next command can resume if this command is interrupted."""
    return OutputFile(path, force, resume=True, say=console.note, home=home)
