"""
A mirror without a reactor, until one is needed: what is over before a reactor could be loaded needs none.

An archive is brought up to date by a coroutine that waits for its mirror. This one does what it is asked
before it answers, so that nobody waits, and the coroutine runs from its beginning to its end; if all goes
well. What cannot be done so is ``mirror.Mirror``'s, and so is everything from there on: the coroutine stands
still until there is one, and never learns of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from pipegrid.disk.commit import Policy
from pipegrid.mirror.address import Address
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.present import Doubt, MirrorEntry
from pipegrid.mirror.report import Report
from pipegrid.mirror.sprint.dialling import BegunConnections
from pipegrid.mirror.sprint.heads import Odd
from pipegrid.mirror.sprint.smallfiles import SmallAnswers, fetch_small
from pipegrid.mirror.wanted import MirrorError
from pipegrid.mirror.work import Work

if TYPE_CHECKING:
    from pipegrid.mirror.mirror import Mirror
    from pipegrid.mirror.small import SmallFiles

P = ParamSpec("P")
T = TypeVar("T")


class _Later:
    """Awaited by what has to wait for a reactor."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class EarlyMirror:
    """
    As ``mirror.Mirror``, whose methods these are.

    Args:
        addresses: without proxies.
        ahead: has begun to connect to them.
        stopped: whether all of it is to end.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        destination: Destination,
        doubt: Doubt,
        policy: Policy,
        connections: int,
        ahead: BegunConnections,
        stopped: Callable[[], bool],
        progress: Callable[[Report], None] | None = None,
    ) -> None:
        self._addresses = addresses
        self.destination = destination
        self._doubt = doubt
        self._policy = policy
        self._connections = connections
        self._ahead = ahead
        self._stopped = stopped
        self._progress = progress
        self._mirror: Mirror | None = None

    def go_on(self, mirror: Mirror) -> None:
        """There is a reactor now, and a mirror on it, with the same destination."""
        self._mirror = mirror

    async def _late(self) -> Mirror:
        if self._mirror is None:
            self._check()
            await _Later()
        assert self._mirror is not None
        return self._mirror

    def _check(self) -> None:
        if self._stopped():
            raise MirrorError(
                f"{self.destination.path}: stopped; the same command can be run again"
            )

    def is_stopped(self) -> bool:
        """Return whether all is to end."""
        return self._stopped() if self._mirror is None else self._mirror.is_stopped()

    @property
    def count(self) -> int:
        """How many mirrors there are."""
        return len(self._addresses)

    def url(self, number: int) -> str:
        """Return that of a mirror."""
        return self._addresses[number].url

    def small_files(self, number: int) -> _EarlySmallFiles:
        return _EarlySmallFiles(lambda asked: self._small(number, asked))

    async def _small(self, number: int, asked: Sequence[tuple[str, int]]) -> SmallAnswers:
        if self._mirror is None:
            self._check()
            try:
                return fetch_small(self._addresses[number], asked, self._ahead, self._stopped)
            except (OSError, Odd):
                pass
        files: SmallFiles = (await self._late()).small_files(number)
        return await files.fetch_all(asked)

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._mirror is not None:
            return await self._mirror.run(function, *args, **kwargs)
        self._check()
        return function(*args, **kwargs)

    async def sync(
        self, files: Iterable[MirrorEntry], *, staged: bool = False, always: bool = False
    ) -> Report:
        """See ``Mirror``; nothing here is a dry run."""
        if self._mirror is not None:
            return await self._mirror.sync(files, staged=staged, always=always)
        self._check()
        work = Work(self.destination, self._addresses, self._doubt, staged)
        if work.sprint(
            files,
            self._policy,
            self._connections,
            self._stopped,
            self._progress,
            ahead=self._ahead,
        ):
            work.finish()
            return work.sum_up()
        return await (await self._late()).finish(work)

    async def delete_others(self, paths: Iterable[str], dry_run: bool = False) -> list[str]:
        return await self.run(self.destination.delete_others, paths, dry_run)


class _EarlySmallFiles:
    """Stands for ``small.SmallFiles``, of which archives use ``fetch_all`` alone."""

    def __init__(
        self, fetch_all: Callable[[Sequence[tuple[str, int]]], Awaitable[SmallAnswers]]
    ) -> None:
        self.fetch_all = fetch_all


def begin_early(work: Coroutine[Any, Any, T]) -> list[T] | None:
    """Run what stands on an ``EarlyMirror``; returns its result, or None: it needs a reactor to go on."""
    try:
        work.send(None)
    except StopIteration as done:
        return [done.value]
    return None


AnyMirror: TypeAlias = "Mirror | EarlyMirror"
"""What an archive stands on."""
