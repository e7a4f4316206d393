"""
The entry point of the ``pipegrid`` command: runs the command line and exits with its status.

This module runs first for every command, so it imports almost nothing, and answers ``--version`` before
anything else is loaded. ``command_grammar`` has the commands.
"""

from __future__ import annotations

import os
import sys
import time

_LEFT = ("twisted.internet.reactor", "pipegrid.mirror.destination", "pipegrid.mirror.stat_cache")
"""If a command has executed one of these modules, the process ends by ``os._exit``."""

LEAST_FILES = 64
"""The value of ``LEAST_FILES`` in ``disk.file_system_calls``, a module that is not loaded here."""


def main() -> None:
    """Run the command line of this process, and exit with its status."""
    _end_at_ctrl_c()
    _fill_standard_streams()
    tell_time()
    if sys.argv[1:] == ["--version"]:
        from pipegrid.version import __version__

        if sys.stdout is None:
            from pipegrid.cli.console import CLOSED

            print(f"pipegrid: {CLOSED}", file=sys.stderr)
            sys.exit(1)
        try:
            print(f"pipegrid {__version__}", flush=True)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                print(
                    f"pipegrid: cannot write to standard output: {error.strerror}", file=sys.stderr
                )
            os._exit(1)  # the interpreter's own exit would flush, and fail, again
        return
    if not _may_open_enough():
        sys.exit(1)
    try:
        import gc

        gc.disable()  # until the work begins: imported modules are not garbage
        from pipegrid.cli.startup.fast_mirror_args import cut_short, dial, read

        plain = read(sys.argv[1:])
        found = None if plain is None else cut_short(plain)
        if isinstance(found, int):
            status = found
        else:
            # The following imports take as long as a round trip to mirrors, so connecting begins before them.
            begun = None if plain is None else dial(plain)
            from pipegrid.cli.startup.lazy_modules import load_own_modules_on_use

            load_own_modules_on_use()
            from pipegrid.cli.startup.process import run_process

            status = run_process(sys.argv[1:], begun, found)
        if any(map(_is_executed, _LEFT)):
            _leave(status)
    except KeyboardInterrupt:  # raised by work without a reactor, after cleaning up
        status = 130
    sys.exit(status)


def _is_executed(name: str) -> bool:
    """Return whether a module was executed, and not only registered for its first use."""
    module = sys.modules.get(name)
    return module is not None and type(module).__name__ != "UnusedModule"


def _end_at_ctrl_c() -> None:
    """Make Ctrl-C end the process silently until ``startup.process`` handles signals."""
    import _signal  # type: ignore[import-not-found]

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))


def _fill_standard_streams() -> None:
    """
    Open /dev/null for closed standard streams, so that no file or connection gets the file descriptors 0 to
    2.

    Otherwise output of libraries on standard error could get into a share, or to a client.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # noqa: PERF203
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: ``number``


def tell_time() -> None:
    """
    Make ``time.time`` return dates beyond 2262 as well, where Python raises OverflowError.

    All modules imported later, such as Python's ``logging``, call ``time.time``, and the clock may be set to
    such a date at any time.
    """
    now = time.time
    clock = time.CLOCK_REALTIME

    def tell() -> float:
        try:
            return now()
        except OverflowError:
            return time.clock_gettime(clock)

    time.time = tell
    time.time_ns = lambda: int(tell() * 1e9)
    for module in list(sys.modules.values()):  # modules that were imported before this call
        for name in ("time", "seconds"):
            if module is not None and vars(module).get(name) is now:
                setattr(module, name, tell)


def _may_open_enough() -> bool:
    """
    Return whether the process is allowed to open ``LEAST_FILES`` files; print an error if not.

    The limit is raised if possible. A command that reaches the limit during its work might not clean up.
    """
    if 0 <= os.sysconf("SC_OPEN_MAX") < LEAST_FILES:
        from pipegrid.disk.file_system_calls import few_files

        if (why := few_files()) is not None:
            if sys.stderr is not None:
                print(f"pipegrid: {why}", file=sys.stderr)
            return False
    return True


def _leave(status: int) -> None:
    """
    Flush the output and end the process at once, without the interpreter's cleanup. Do nothing if a tracer or
    profiler is active, since it needs that cleanup. All other files must be closed.

    Freeing five hundred modules took a tenth of the CPU time of a small ``put``.
    """
    if sys.gettrace() is None and sys.getprofile() is None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                try:  # noqa: SIM105  # contextlib is a tenth of what the shortest command loads
                    stream.flush()
                except (OSError, ValueError):
                    pass  # the error has been reported as far as possible
        os._exit(status)
