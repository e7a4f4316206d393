"""
The file scheduler: which file is requested from which mirror next, and the outcomes. Without input or output.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from pipegrid.mirror.archive_file import ArchiveFile

# Which file is requested from which mirror next: decisions, without a connection, a clock or a file.
#
# **Goal.** Every mirror's link is full until the last file; no file is lost because one mirror failed; the
# run does not wait for the slowest mirror.
#
# **Queue.** The largest files are requested first. So the first request on a connection is a large one, and
# TCP opens its window; the many small ones keep the pipes full at the end, when every link is fast.
#
# **Failures.** If a mirror could not give a file, the file is put back for *another* mirror. A file that a
# mirror lacks or has wrong (``refused``) is not requested from this mirror again; when all mirrors have
# refused a file, the file has failed. A transfer that broke (``broken``: lost connections, silence,
# incomplete responses) says nothing about the file: other mirrors are asked first, then the same one again,
# at most ``MAX_BREAKS`` times for each mirror. A request that was not processed (``put_back``) is no failure,
# and neither is one that an overloaded mirror has deferred (``busy``).
#
# **Pipelining.** Some servers and proxies confuse, drop or join the responses to pipelined requests. So a
# refusal is final only if the request was alone on a connection that never had two at a time. If a file is
# *wrong* and was requested in ``company`` (on a connection with further requests), this is uncertain: the
# file is requested from the mirror again, alone, and until the response the mirror gets one request at a time
# (``is_serial``). If the file is then right, the mirror is serial for the rest of the run; if the file is
# wrong again, the mirror has a wrong file, and its requests are pipelined again. After a refusal in company,
# other mirrors are asked first.
#
# **Invariant.** Each file is in exactly one state: waiting, in flight (once or, near the end, twice), done,
# failed.

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import
if TYPE_CHECKING:
    from typing import Literal

    Failure = Literal["refused", "wrong", "broken", "busy"]

MAX_BREAKS = 3
"""Maximum number of broken transfers of one file from one mirror. Each costs at least a connection."""

UNKNOWN_BYTES = 1 << 20
"""The assumed size of a file of unknown size, mostly an index; large, since other files wait for it."""


class FetchJob:
    """
    One file and the state of its requests. There may be hundreds of thousands of jobs, so a job is small.

    Attributes:
        refused_by, in_flight: bit sets, one bit per mirror: the mirrors that lack the file or have it wrong,
            and those from which it is requested now.
        company: bits of the mirrors from which the file is requested on a connection with further requests.
        unproven: bits of the mirrors that refused the file in company.
        uncertain: bits of the mirrors from which the file must be requested again, alone.
        breaks: how often a transfer broke, by mirror; None: never.
        reasons: by mirror, why it last did not give the file; for messages.
        is_over: the file is done, or has failed.
    """

    __slots__ = (
        "breaks",
        "company",
        "in_flight",
        "is_over",
        "reasons",
        "refused_by",
        "uncertain",
        "unproven",
        "wanted",
    )

    def __init__(self, wanted: ArchiveFile) -> None:
        self.wanted = wanted
        self.refused_by = 0
        self.in_flight = 0
        self.company = 0
        self.unproven = 0
        self.uncertain = 0
        self.is_over = False
        self.breaks: dict[int, int] | None = None
        self.reasons: dict[int, str] | None = None

    def __repr__(self) -> str:
        state = "over" if self.is_over else "in flight" if self.in_flight else "waiting"
        return f"<FetchJob {self.wanted.path!r} {state}>"

    @property
    def size_bytes(self) -> int:
        """The size of the file; ``UNKNOWN_BYTES`` if unknown."""
        return _size_of(self.wanted)

    def breaks_at(self, mirror: int) -> int:
        """Return how often a transfer of the file from a mirror broke."""
        return 0 if self.breaks is None else self.breaks.get(mirror, 0)

    def note(self, mirror: int, reason: str) -> None:
        """Record why a mirror could not give the file."""
        if self.reasons is None:
            self.reasons = {}
        self.reasons[mirror] = reason


def _size_of(wanted: ArchiveFile) -> int:
    return UNKNOWN_BYTES if wanted.size is None else wanted.size


def _job_of(each: FetchJob | ArchiveFile) -> FetchJob:
    return each if isinstance(each, FetchJob) else FetchJob(each)


class Scheduler:
    """
    The files of one run, and from which mirror each is requested next.

    Args:
        mirrors: how many mirrors there are; they are numbered from 0.
        urls: of the mirrors.
        serial_urls: of the mirrors that this run has found unable to pipeline; the scheduler adds more.

    Attributes:
        failed: files that no mirror could give.
        done_files, done_bytes: how much was fetched; ``done_paths``: the paths of the first ``MAX_SHOWN`` of
            these files.
        retries: how often a file was put back.
    """

    def __init__(
        self, mirrors: int, urls: Sequence[str] = (), serial_urls: set[str] | None = None
    ) -> None:
        self.failed: list[FetchJob] = []
        self.done_files = self.done_bytes = self.retries = 0
        self.done_paths: list[str] = []
        self.serial_urls: set[str] = set() if serial_urls is None else serial_urls
        self._mirrors = mirrors
        self._urls = urls or [str(number) for number in range(mirrors)]
        # For each mirror: the waiting files that must be requested from it without company, and the number of
        # uncertain files, including those in flight.
        self._doubted: list[list[FetchJob]] = [[] for _ in range(mirrors)]
        self._uncertain_jobs = [0] * mirrors
        self._gone: set[int] = set()
        self._resting: set[int] = set()
        # A heap with the largest file first; the count keeps files of equal size in the order of arrival.
        # Size and count are one number, and a file without a request has no job: for a list of 300,000 files
        # that saves 50 MB.
        self._waiting: list[tuple[int, FetchJob | ArchiveFile]] = []
        self._count = 0
        # One list for all mirrors, since the files that were put back are few, and a search takes little.
        self._again: list[FetchJob] = []
        self._open = 0

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self._waiting)} waiting, {len(self._again)} again, {self._open} open,"
            f" {self.done_files} done, {len(self.failed)} failed>"
        )

    @property
    def is_idle(self) -> bool:
        """Whether every file is done or has failed."""
        return not self._open

    @property
    def waits(self) -> bool:
        """Whether any file waits for a request."""
        return bool(self._waiting or self._again) or any(self._doubted)

    def is_serial(self, mirror: int) -> bool:
        """Return whether a mirror gets one request at a time, on connections that never had two at a time."""
        return bool(self._uncertain_jobs[mirror]) or self._urls[mirror] in self.serial_urls

    def becomes_serial(self, mirror: int) -> None:
        """Record that a mirror cannot pipeline; it gets one request at a time for the rest of the run."""
        self.serial_urls.add(self._urls[mirror])

    def add(self, wanted: ArchiveFile) -> None:
        self._open += 1
        self._put(wanted, _size_of(wanted))

    def add_done(
        self, files: int, size_bytes: int, retries: int, paths: Sequence[str] = ()
    ) -> None:
        """Count files that other processes have fetched and that were never added to this scheduler."""
        self.done_paths += paths[: MAX_SHOWN - len(self.done_paths)]
        self.done_files += files
        self.done_bytes += size_bytes
        self.retries += retries

    def add_failed(self, wanted: ArchiveFile, refused_by: int, reasons: dict[int, str]) -> None:
        """
        Add a wanted file that other processes could not fetch; the arguments are attributes of ``FetchJob``.
        """
        job = FetchJob(wanted)
        job.refused_by = refused_by
        job.reasons = reasons or None
        self._open += 1
        self._put_back(job)

    def next(self, mirror: int) -> FetchJob | None:
        """
        Return the next file to request from this mirror; None if no waiting file may be requested from it.
        """
        if mirror in self._gone:
            return None
        job = self._take_doubted(mirror, mirror) or self._take_again(mirror)
        if job is None and self._waiting:
            job = _job_of(heapq.heappop(self._waiting)[1])
        if job is None:
            for other in range(self._mirrors):
                job = job or self._take_doubted(other, mirror)
        if job is None:
            return None
        job.in_flight |= 1 << mirror
        return job

    def copy(self, job: FetchJob, mirror: int) -> bool:
        """
        Mark a file as requested from another mirror as well, since the first is slow; return False if that is
        not allowed.
        """
        if job.is_over or job.in_flight >> mirror & 1 or not self._may_ask(job, mirror):
            return False
        job.in_flight |= 1 << mirror
        return True

    def done(self, job: FetchJob, mirror: int, size_bytes: int) -> bool:
        """Record that a file has arrived and is right; return False if another mirror was faster."""
        self._arrived(job, mirror)
        if job.is_over:
            return False
        if job.uncertain >> mirror & 1:
            self.retries += 1
            self.becomes_serial(mirror)
        self._settle(job, job.uncertain)
        job.is_over = True
        self._open -= 1
        self.done_files += 1
        self.done_bytes += size_bytes
        if len(self.done_paths) < MAX_SHOWN:
            self.done_paths.append(job.wanted.path)
        return True

    def put_back(self, job: FetchJob, mirror: int) -> None:
        """
        Put back a file whose request the mirror has not processed, or that was withdrawn; this is not a
        failure.
        """
        self._arrived(job, mirror)
        self._put_back(job)

    def failed_at(self, job: FetchJob, mirror: int, kind: Failure, reason: str) -> bool:
        """
        Record that this mirror could not give the file; it is put back, or has failed if no mirror is left.

        Returns:
            False if the failure is uncertain: the file is wrong, but other requests were on the connection,
                so their responses may be mixed up. The file is requested from this mirror again, alone.
        """
        bit = 1 << mirror
        in_company = job.company & bit
        self._arrived(job, mirror)
        if job.is_over:
            return True
        job.note(mirror, reason)
        if kind == "wrong" and in_company:
            self._mark_uncertain(job, bit)
            self._put_back(job)
            return False
        if kind in ("refused", "wrong"):
            job.refused_by |= bit
            job.unproven |= in_company
            if not in_company:
                self._settle(job, job.uncertain & bit)
        elif kind == "broken":
            breaks = job.breaks = job.breaks or {}
            breaks[mirror] = breaks.get(mirror, 0) + 1
        self.retries += 1
        self._put_back(job)
        return True

    def _mark_uncertain(self, job: FetchJob, mirrors: int) -> None:
        """Record that the file must be requested from these mirrors again, alone."""
        job.refused_by &= ~mirrors
        job.unproven &= ~mirrors
        for mirror in range(self._mirrors):
            self._uncertain_jobs[mirror] += (mirrors & ~job.uncertain) >> mirror & 1
        job.uncertain |= mirrors

    def _settle(self, job: FetchJob, mirrors: int) -> None:
        """Record that the file need not be requested alone from these mirrors any more."""
        job.uncertain &= ~mirrors
        if mirrors:
            for mirror in range(self._mirrors):
                self._uncertain_jobs[mirror] -= mirrors >> mirror & 1

    def rests(self, mirror: int, resting: bool = True) -> None:
        """Record that a mirror begins or ends a rest; meanwhile no file is reserved for this mirror."""
        if resting:
            self._resting.add(mirror)
        else:
            self._resting.discard(mirror)

    def gave_up(self, mirror: int, reason: str) -> None:
        """Request nothing more from this mirror; its requests must have been put back or failed."""
        self._gone.add(mirror)
        again, self._again = self._again + self._doubted[mirror], []
        self._doubted[mirror] = []
        for job in again:
            if len(self._gone) == self._mirrors:
                job.note(mirror, reason)
            self._put_back(job)
        if len(self._gone) < self._mirrors:
            return  # the remaining mirrors can still be asked for the waiting files
        waiting, self._waiting = self._waiting, []
        common = {mirror: reason}
        for _, each in waiting:
            job = _job_of(each)
            if job.reasons is None:
                job.reasons = common
            else:
                job.note(mirror, reason)
            self._put_back(job)

    def _put(self, each: FetchJob | ArchiveFile, size_bytes: int) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (self._count - (size_bytes << 32), each))

    def _put_back(self, job: FetchJob) -> None:
        if job.is_over or job.in_flight:
            return
        if job.uncertain:
            able = self._able(job)
            self._settle(job, job.uncertain & ~able)
        elif job.unproven and not self._able(job):
            self._mark_uncertain(job, job.unproven)
            self._settle(job, job.uncertain & ~self._able(job))
        if job.uncertain:
            first = (job.uncertain & -job.uncertain).bit_length() - 1
            self._doubted[first].append(job)
        elif not any(self._may_ask(job, mirror) for mirror in range(self._mirrors)):
            job.is_over = True
            self._open -= 1
            self.failed.append(job)
        elif job.refused_by or job.breaks:
            self._again.append(job)
        else:
            self._put(job, job.size_bytes)

    def _arrived(self, job: FetchJob, mirror: int) -> None:
        assert job.in_flight >> mirror & 1, job
        job.in_flight &= ~(1 << mirror)
        job.company &= ~(1 << mirror)

    def _able(self, job: FetchJob) -> int:
        """Return the bits of the mirrors that the file may be requested from."""
        return sum(1 << each for each in range(self._mirrors) if self._may_ask(job, each))

    def _may_ask(self, job: FetchJob, mirror: int) -> bool:
        return (
            mirror not in self._gone
            and not job.refused_by >> mirror & 1
            and job.breaks_at(mirror) < MAX_BREAKS
        )

    def _take_doubted(self, of: int, mirror: int) -> FetchJob | None:
        """
        Return, for ``mirror``, a waiting file that must be requested alone from mirror ``of``, and remove it
        from the queue; None if there is none.
        """
        for index, job in enumerate(self._doubted[of]):
            if self._may_ask(job, mirror):
                return self._doubted[of].pop(index)
        return None

    def _take_again(self, mirror: int) -> FetchJob | None:
        """
        Return, for ``mirror``, a put-back file, and remove it from the queue; leave files whose transfers
        broke less often from other mirrors to these mirrors.
        """
        for index, job in enumerate(self._again):
            if not self._may_ask(job, mirror):
                continue
            breaks = job.breaks_at(mirror)
            others = (
                job.breaks_at(other)
                for other in range(self._mirrors)
                if other not in self._resting and self._may_ask(job, other)
            )
            if breaks <= min(others, default=breaks):
                return self._again.pop(index)
        return None

    def waiting(self) -> Iterator[FetchJob]:
        """Yield the waiting files, in no particular order."""
        for entry in self._waiting:
            yield _job_of(entry[1])
        yield from self._again
        for doubted in self._doubted:
            yield from doubted

    def _check_invariants(self) -> None:
        for job in self.waiting():
            assert not job.is_over, job
            assert not job.in_flight, job
        assert self._open >= 0, self
        assert all(count >= 0 for count in self._uncertain_jobs), self._uncertain_jobs


# The outcome of a run, in total and for each mirror; also while the run is in progress.

MAX_SHOWN = 20
"""How many reasons or paths are kept for messages; further ones are only counted."""


class Tally:
    """
    The results of one mirror.

    Attributes:
        busy_s: the time with outstanding responses.
        broken: how many transfers broke; ``refused``: how many files the mirror lacked or had wrong.
        given_up: why nothing more is requested from the mirror; None if it is still used.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.files = self.received_bytes = self.refused = self.broken = self.connections = 0
        self.busy_s = 0.0
        self.given_up: str | None = None

    @property
    def bytes_per_s(self) -> float:
        """The speed in the time with outstanding responses; 0.0 if there was none."""
        return self.received_bytes / self.busy_s if self.busy_s else 0.0


class Report:
    """
    The outcome of a run, up to now if the run is in progress.

    Attributes:
        wanted_files, wanted_bytes: in the list or index, as far as it has been read.
        present_files: those that existed and were right.
        fetched_files, fetched_bytes: those that were fetched, or in a dry run would be.
        fetched: the paths of the first ``MAX_SHOWN`` fetched files.
        failed: path and reason of the first ``MAX_SHOWN`` files that failed; when verifying, that are missing
            or wrong.
        failed_files: how many files failed.
        unnoted_files: how many records of files could not be written or removed; see ``Destination``.
        retries: how often a file was requested again, from the same or another mirror.
        tallies: of each mirror, in the order given.
        elapsed_s: the duration of the run until now.
    """

    def __init__(self, tallies: Sequence[Tally] = ()) -> None:
        self.wanted_files = self.wanted_bytes = 0
        self.present_files = self.present_bytes = 0
        self.fetched_files = self.fetched_bytes = 0
        self.failed_files = self.unnoted_files = self.retries = 0
        self.fetched: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.tallies = tallies
        self.elapsed_s = 0.0

    def fail(self, path: str, why: str) -> None:
        """Add a file that could not be fetched, or is wrong."""
        self.failed_files += 1
        if len(self.failed) < MAX_SHOWN:
            self.failed.append((path, why))

    def withdraw(self, path: str) -> None:
        """Remove a failed file from the report, since it exists after all."""
        self.failed_files -= 1
        self.failed = [each for each in self.failed if each[0] != path]

    @property
    def is_stopped(self) -> bool:
        """Whether every mirror has been given up."""
        return all(tally.given_up is not None for tally in self.tallies)

    @property
    def ranking(self) -> list[Tally]:
        """The mirrors, the fastest first."""
        return sorted(self.tallies, key=lambda tally: -tally.bytes_per_s)
