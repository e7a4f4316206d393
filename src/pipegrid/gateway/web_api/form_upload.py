"""
Forms with several files, or with a folder: each file becomes a child of a directory or of a subdirectory.

A browser sends the files of a folder with their paths as names, even without scripts. Missing directories are
created. If a file cannot be stored, the response names it, and the other files are still stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pipegrid.core.caps import DirectoryCap
from pipegrid.core.mutable.directory_content_edits import Link
from pipegrid.core.text import composed, counted, printable
from pipegrid.errors import PipegridError
from pipegrid.gateway.form_body import FormFile
from pipegrid.gateway.http_response import HttpResponse, WebError, problem_of
from pipegrid.gateway.web_api.api_request import ApiRequest, when_done
from pipegrid.gateway.web_api.path_lookup import check_writes, children_of
from pipegrid.reactor.deferreds import few_at_a_time
from pipegrid.tree.directory import Directory, check_name, make_directories
from pipegrid.tree.walk import TreePath

AT_ONCE = 16
"""How many directories are created, and how many files are stored, at the same time."""

MAX_DEPTH = 100
MAX_FOLDERS = 1000
"""Maximum number of folders in a form: each may need a new directory, which needs a new key."""

MAX_NAMED = 20
"""How many of the files that could not be stored are named in the response."""


def are_several(files: Sequence[FormFile]) -> bool:
    """Return whether a form has several files, or a file in a folder."""
    return len(files) > 1 or any("/" in file.name for file in files)


def form_paths(files: Sequence[FormFile]) -> list[TreePath]:
    """
    Return the paths of a form's files, relative to the directory.

    Raises:
        WebError: a name is not a path, or leads out of the directory; a path occurs twice, or as a file and a
            folder; or there are too many folders.
        UsageError: a path contains a name that no child can have.
    """
    found: dict[TreePath, None] = {}
    folders: set[TreePath] = set()
    for file in files:
        path = tuple(composed(name) for name in file.name.split("/"))
        if len(path) > MAX_DEPTH or {"", ".", ".."} & set(path):
            shown = printable(file.name[:100])
            raise WebError(
                400, f"'{shown}' is not a path of a file in a folder; nothing was stored"
            )
        if path in found:
            shown = printable("/".join(path)[:100])
            raise WebError(400, f"the form has two files '{shown}'; nothing was stored")
        for name in path:
            check_name(name)
        found[path] = None
        folders.update(_folders_of(path))
        if len(folders) > MAX_FOLDERS:
            raise WebError(413, f"the form has more than {MAX_FOLDERS} folders; send them in parts")
    if both := folders & found.keys():
        shown = printable("/".join(min(both))[:100])
        raise WebError(400, f"'{shown}' is a file and a folder; nothing was stored")
    return list(found)


def _folders_of(path: TreePath) -> list[TreePath]:
    return [path[:depth] for depth in range(1, len(path))]


class FolderUpload:
    """
    Stores the files of one form.

    Attributes:
        problems: for each file that could not be stored, by path, the reason.
    """

    def __init__(self, call: ApiRequest, cap: DirectoryCap) -> None:
        self._grid = call.grid
        self._replace = call.arguments.replace()
        self._directories: dict[TreePath, Directory | PipegridError] = {
            (): Directory(call.grid, cap)
        }
        self._taken: dict[TreePath, frozenset[str]] = {}
        self.problems: dict[TreePath, WebError] = {}

    async def store(self, files: Sequence[tuple[TreePath, FormFile]]) -> None:
        """Store and link the files; record in ``problems`` those for which this failed."""
        folders = {each for path, _ in files for each in _folders_of(path)}
        for depth in range(1, MAX_DEPTH):
            level = [path for path in folders if len(path) == depth]
            await few_at_a_time(AT_ONCE, [partial(self._make, path) for path in level])
        if self._replace == "false":
            used = {path[:-1] for path, _ in files}
            await few_at_a_time(AT_ONCE, [partial(self._look, path) for path in used])
        await few_at_a_time(AT_ONCE, [partial(self._store, *each) for each in files])

    def _directory(self, path: TreePath) -> Directory:
        """Return the directory of a path; raise the error with which it could not be created or read."""
        found = self._directories[path]
        if isinstance(found, PipegridError):
            raise found
        return found

    async def _make(self, path: TreePath) -> None:
        try:
            above = self._directory(path[:-1]).cap
            self._directories[path] = await make_directories(self._grid, above, path[-1:], "sdmf")
        except PipegridError as error:
            self._directories[path] = error

    async def _look(self, path: TreePath) -> None:
        """
        Record which names exist in a directory: with ``replace=false``, files of these names are not stored.
        """
        try:
            cap = self._directory(path).cap
            self._taken[path] = frozenset(await children_of(self._grid, cap))
        except PipegridError as error:
            self._directories[path] = error

    async def _store(self, path: TreePath, file: FormFile) -> None:
        try:
            directory = self._directory(path[:-1])
            if path[-1] in self._taken.get(path[:-1], ()):
                raise WebError(409, "there is a child of this name already")
            with file.opened() as source:
                cap = (await self._grid.put(source)).cap
            # As for a single upload, the link replaces a file, but never a directory.
            link = Link(path[-1], cap, None, None, self._replace != "false", False)
            await directory.change([link])
        except PipegridError as error:
            self.problems[path] = problem_of(error)


async def upload_files(
    call: ApiRequest, cap: DirectoryCap, files: Sequence[FormFile]
) -> HttpResponse:
    """
    Answer ``t=upload`` of a form with several files.

    Raises:
        WebError: some files were not stored; the message names them.
    """
    if call.arguments.format() in ("SDMF", "MDMF"):
        raise WebError(
            400, "several files are stored as immutable ones; leave out format and mutable"
        )
    paths = form_paths(files)
    work = FolderUpload(call, check_writes(cap))
    await work.store(list(zip(paths, files, strict=True)))
    if work.problems:
        raise _not_stored(work.problems, len(files))
    return when_done(call, f"{counted(len(files), 'file was', 'files were')} stored\n")


def _not_stored(problems: dict[TreePath, WebError], count: int) -> WebError:
    statuses = {problem.status for problem in problems.values()}
    named = [
        f"{printable('/'.join(path))} ({problem})"
        for path, problem in sorted(problems.items())[:MAX_NAMED]
    ]
    more = len(problems) - len(named)
    rest = f", and {more} more" if more else ""
    text = f"{len(problems)} of {count} files were not stored: {', '.join(named)}{rest}"
    return WebError(statuses.pop() if len(statuses) == 1 else 500, text)
