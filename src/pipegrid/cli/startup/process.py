"""
Runs one command as a process, with real streams, signals and the real reactor.

This is the only module that uses the global reactor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from pipegrid.cli.command_job import (
    GridJob,
    Invocation,
    Job,
    NoReactorJob,
    OfflineJob,
    ReactorJob,
    failure,
)
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, Interrupted, sentence
from pipegrid.cli.startup.fast_mirror_args import plain_job
from pipegrid.cli.startup.lazy_modules import install_lazy_modules, tls_put_off
from pipegrid.disk.interruptible_pipe_writes import end_waiting
from pipegrid.errors import SinkError
from pipegrid.reactor.process_settings import (
    SHORTAGE,
    TOR_START,
    ignore_suspended_time,
    make_monotonic,
    need_no_threads,
    tune_gc,
    wake_for_signals,
)

TYPE_CHECKING = False  # instead of the import from ``typing``, which is slow
if TYPE_CHECKING:
    from typing import Any

    from twisted.internet.defer import Deferred

    from pipegrid.mirror.preconnect_mirrors import EarlySockets
    from pipegrid.mirror.stat_cache import QuickCheckResult

_M_ARENA_MAX = -8  # the number of an option of glibc's mallopt

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command after its cleanup: Ctrl-C sends the first, a closed terminal the last."""


def _end_now(_number: int, _frame: object) -> None:
    """
    End the process; used before the work begins, and after all work is done.

    An exception would not work: if it is raised in a callback of Python itself, such as during an import,
    Python prints and drops it.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"pipegrid: {sentence(Interrupted())}\n".encode())
    os._exit(ExitStatus.INTERRUPTED)


def _raise_again(unraisable: Any) -> None:
    """Raise an interrupt again that was raised in a finalizer, where Python drops exceptions."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        import _thread

        _thread.interrupt_main()
    else:
        sys.__unraisablehook__(unraisable)


def _handle_all(handler: Callable[[int, Any], Any]) -> None:
    """
    Set the handler of the signals that end a command; signals that the parent process has made this process
    ignore (``nohup``, or a shell's background) stay ignored.
    """
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def run_process(
    arguments: Sequence[str],
    begun: EarlySockets | None = None,
    glimpse: QuickCheckResult | None = None,
) -> int:
    """
    Run a command line with this process's streams and signals, and return its exit status.

    Args:
        begun: connections to mirrors that were opened in advance, or None.
        glimpse: the result of ``mirror verify``'s quick check, or None.
    """
    _handle_all(_end_now)
    console = Console(
        getattr(sys.stdin, "buffer", None), getattr(sys.stdout, "buffer", None), _stderr()
    )
    SHORTAGE.tell = TOR_START.tell = console.note
    try:
        invocation, job = _parse(arguments, console, begun, glimpse)
    except BrokenPipeError:  # the reader of --help closed its end
        _forget_stdout()
        return ExitStatus.FAILED
    except Exception as error:
        status = failure(error, console)
        # Click prints the help without the console, so the console has no record of the failure.
        if isinstance(error, SinkError):
            _forget_stdout()
            return status
        return _flush(console, status)
    if isinstance(job, OfflineJob):
        tune_gc()
        sys.unraisablehook = _raise_again
        _handle_all(signal.default_int_handler)  # so that the job can clean up
        status = job.run(console)
        _handle_all(_end_now)
    else:
        found = _cut_short(job, console) if isinstance(job, NoReactorJob) else None
        if begun is not None:
            begun.close()
        try:
            status = run_job(job, invocation) if found is None else found
        except Exception as error:  # e.g. too few free file descriptors for a reactor
            status = failure(error, console)
    return _flush(console, status)


def run_job(job: GridJob | ReactorJob, invocation: Invocation) -> int:
    """Run a job with a reactor, and return its exit status; can be called only once per process."""
    install_lazy_modules()  # before Twisted is imported
    one_heap()  # before there are threads
    ahead = None
    # With a rate limit no connections are opened in advance, since their handshakes would not be counted.
    if isinstance(job, GridJob) and job.asks_servers and invocation.limit_rate is None:
        from pipegrid.cli.startup.preconnect_servers import dial

        ahead = dial(invocation.directory)  # connects while the next lines import modules
    from pipegrid.cli.command_grammar import start_job

    return _run_reactor(
        lambda reactor: start_job(job, invocation, reactor, ahead=ahead), invocation
    )


def _parse(
    arguments: Sequence[str],
    console: Console,
    begun: EarlySockets | None,
    glimpse: QuickCheckResult | None,
) -> tuple[Invocation, Job]:
    if (job := plain_job(arguments, console, begun, glimpse)) is not None:
        return Invocation(console), job
    install_lazy_modules()  # before click is imported
    from pipegrid.cli.command_grammar import parse

    return parse(arguments, console, run_job)


def _cut_short(job: NoReactorJob, console: Console) -> int | None:
    """
    Do the job without a reactor if possible. A signal ends the job when it next checks; a second signal, at
    once.
    """
    signals: list[int] = []

    def note(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        signals.append(number)

    _handle_all(note)
    try:
        return job.run_without_reactor(console, lambda: bool(signals))
    finally:
        _handle_all(_end_now)


def _stderr() -> Any:
    return sys.stderr or open(os.devnull, "w")


def _flush(console: Console, status: int) -> int:
    """Flush the output here, where a failure can still be reported; return the status."""
    try:
        console.results.flush()
    except Exception as error:
        status = failure(error, console)
    if console.results.abandoned or (console.results.failed and sys.stdout is not None):
        _forget_stdout()
    return status


def _forget_stdout() -> None:
    """
    Replace standard output by /dev/null, so that the interpreter's flush at its exit does not fail again.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run_reactor(start: Callable[[Any], Deferred[int]], invocation: Invocation) -> int:
    """Run the reactor until the Deferred that ``start`` returns has fired; signals cancel the Deferred."""
    with tls_put_off():
        from twisted.internet import reactor as global_reactor

    reactor: Any = global_reactor
    make_monotonic(reactor)
    ignore_suspended_time(reactor)
    need_no_threads(reactor)
    _log_to(invocation.console)
    outcome = _Outcome(reactor, invocation.console)
    reactor.callWhenRunning(outcome.begin, start)
    # Twisted's own handlers would stop the reactor before the command has cleaned up.
    _handle_all(outcome.interrupted)
    wake_for_signals(reactor)
    reactor.run(installSignalHandlers=False)
    _handle_all(_end_now)
    return outcome.status


def one_heap() -> None:
    """
    Make the C library (glibc) serve all threads from one heap.

    Segments are encoded in worker threads and freed in the reactor's thread. With a heap for each thread, a
    put of a large file over a path with a long round trip needed 10 MiB more at its peak, and took as long as
    with one heap.
    """
    import ctypes  # slow to import; only grid commands need it

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


class _Outcome:
    """The running command, and its exit status."""

    def __init__(self, reactor: Any, console: Console) -> None:
        self.status: int = ExitStatus.FAILED
        self._reactor = reactor
        self._console = console
        self._command: Deferred[int] | None = None
        self._interrupted = False

    def begin(self, start: Callable[[Any], Deferred[int]]) -> None:
        from twisted.internet.defer import maybeDeferred

        # Without ``maybeDeferred``, the reactor would run forever if ``start`` itself raised an error.
        self._command = maybeDeferred(start, self._reactor)
        tune_gc()  # the command's modules are imported now
        self._command.addCallback(self._finished).addErrback(self._broken)
        self._command.addBoth(lambda _: self._reactor.stop())

    def _finished(self, status: int) -> None:
        # An interrupted command that did not finish has this status, whatever it reports.
        stopped = self._interrupted and status != ExitStatus.DONE
        self.status = ExitStatus.INTERRUPTED if stopped else status

    def _broken(self, reason: Any) -> None:
        self.status = failure(reason.value, self._console)

    def interrupted(self, number: int, frame: Any) -> None:
        """Handle a signal: cancel the command; a second signal ends the process at once."""
        signal.signal(number, signal.SIG_DFL)
        if not self._interrupted:  # a second signal may come during this call
            self._interrupted = True
            self._reactor.callFromThread(self._cancel)
            from twisted.internet.defer import CancelledError

            end_waiting(CancelledError())  # ends a wait for the output's reader, too

    def _cancel(self) -> None:
        if self._command is not None:
            self._command.cancel()


def _log_to(console: Console) -> None:
    """Print Twisted's warnings and errors, with tracebacks, if ``-v`` is given; otherwise drop them."""
    from twisted.logger import ILogObserver, formatEvent, globalLogBeginner
    from zope.interface import provider

    @provider(ILogObserver)
    def observe(event: Any) -> None:
        failed = event.get("log_failure")
        if failed is not None or event["log_level"].name in ("warn", "error", "critical"):
            console.detail(formatEvent(event))
            if failed is not None:
                console.detail(failed.getTraceback())

    globalLogBeginner.beginLoggingTo([observe], discardBuffer=True, redirectStandardIO=False)
