"""
Listing a run that is stored, in the catalogue and under an alias.

It is noted before, so that a run that cannot be listed is listed by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred

from pipegrid.errors import NotEnoughSharesError, PipegridError, RollbackError
from pipegrid.reactor.together import together
from pipegrid.tree.backup.archives import Archives
from pipegrid.tree.backup.catalogue import BackupRun, entry_name, runs_of
from pipegrid.tree.backup.cataloguestore import CatalogueChange, CatalogueStore, Changed
from pipegrid.tree.backup.place import BackupPlace, Noted
from pipegrid.tree.backup.retention import Retention

T = TypeVar("T")


@attrs.frozen
class ListedRun:
    """
    What came of listing a run.

    Attributes:
        run: as it is listed.
        forgotten: runs that are not listed any more.
        problems: why it is not listed, or not under its alias; the catalogue's is the first.
        is_nowhere: of the servers that answered none has anything of the catalogue.
    """

    run: BackupRun
    forgotten: tuple[BackupRun, ...] = ()
    problems: tuple[PipegridError, ...] = ()
    is_nowhere: bool = False


class RunLister:
    """
    Lists runs of one client.

    Args:
        say: told, in a sentence, what the user should know.
    """

    def __init__(
        self, place: BackupPlace, catalogues: CatalogueStore, say: Callable[[str], None]
    ) -> None:
        self._place = place
        self._catalogues = catalogues
        self._say = say

    async def list(
        self, noted: Noted, archives: Archives | None, run: BackupRun, retention: Retention
    ) -> ListedRun:
        """List a run that is stored; ``noted`` is what is remembered of the catalogue without it."""
        others = [each for each in noted.unlisted if entry_name(each) != entry_name(run)]
        noted = attrs.evolve(noted, unlisted=(*others, run))
        self._place.note(noted)

        async def trying(work: Coroutine[Any, Any, T]) -> T | PipegridError:
            try:
                return await work
            except PipegridError as error:
                return error

        change = CatalogueChange(noted.unlisted, retention)
        forgotten: tuple[BackupRun, ...] = ()
        if noted.content is not None:
            assert noted.cap is not None
            forgotten = tuple(change.apply(runs_of(noted.cap, noted.content))[1])
        steps: list[Deferred[Any]] = [Deferred.fromCoroutine(trying(self._change(noted, change)))]
        if archives is not None:
            keeping = archives.keep(run, forgotten)
            steps.append(Deferred.fromCoroutine(trying(keeping)))
        outcomes = await together(steps)
        problems = tuple(each for each in outcomes if isinstance(each, PipegridError))
        changed = outcomes[0]
        if not isinstance(changed, Changed):
            nowhere = isinstance(changed, NotEnoughSharesError) and not changed.found
            return ListedRun(run, (), problems, nowhere)
        self._place.note(Noted(noted.cap, changed.content, (), changed.version))
        return ListedRun(changed.run or run, changed.forgotten, problems)

    async def _change(self, noted: Noted, change: CatalogueChange) -> Changed:
        assert noted.cap is not None
        try:
            return await self._catalogues.change(noted.cap, change, noted.content)
        except RollbackError as error:
            if noted.content is None or noted.version < error.seen:
                raise  # what was seen last may be another machine's, and come back
            self._say(
                "servers show an older list of backups than this client has seen, so it is written anew from "
                "what this client remembers"
            )
            return await self._catalogues.write_anew(noted.cap, change, noted.content)
