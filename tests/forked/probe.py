"""Tells what a process begins with: run by ``test_forked`` as ``python -m probe``, fresh and forked."""

from __future__ import annotations

import gc
import json
import locale
import os
import random
import resource
import signal
import sys
import threading
import time
from typing import Any


def stream(name: str) -> list[Any]:
    """Return all that can be asked of a standard stream before it is used."""
    found = getattr(sys, name)
    assert found is getattr(sys, f"__{name}__")
    attributes = (
        "name",
        "mode",
        "encoding",
        "errors",
        "line_buffering",
        "write_through",
        "newlines",
    )
    return [getattr(found, each) for each in attributes] + [found.fileno(), found.isatty()]


def facts() -> dict[str, Any]:
    """Return what has to be the same however a process was begun."""
    main = sys.modules["__main__"]
    mask = os.umask(0)
    os.umask(mask)
    return {
        "arguments": sys.argv,
        "all arguments": sys.orig_argv[1:],
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "path": sys.path,
        "streams": [stream(name) for name in ("stdin", "stdout", "stderr")],
        "handlers": {str(each): str(signal.getsignal(each)) for each in signal.valid_signals()},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "waking": signal.set_wakeup_fd(-1),
        "umask": mask,
        "files": sorted(os.listdir("/dev/fd")),
        "flags": str(sys.flags),
        "warnings": sys.warnoptions,
        "no bytecode": sys.dont_write_bytecode,
        "threads": [each.name for each in threading.enumerate()],
        "collector": [gc.isenabled(), gc.get_threshold()],
        "locale": locale.setlocale(locale.LC_ALL),
        "zone": time.tzname,
        "main": [main.__name__, getattr(main, "__file__", None), main.__spec__.name],  # type: ignore[union-attr]
        "group": os.getpgrp(),
        "limits": [
            resource.getrlimit(getattr(resource, name))
            for name in sorted(vars(resource))
            if name.startswith("RLIMIT_")
        ],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "depth": sys.getrecursionlimit(),
        "tracing": [sys.gettrace() is None, sys.getprofile() is None],
        "reactor": "twisted.internet.reactor" in sys.modules,
    }


def main() -> None:
    """Do what the argument says."""
    what = sys.argv[1]
    if what == "facts":
        print(json.dumps(facts()))
    elif what == "random":
        print(random.random(), os.getpid())
    elif what == "copy":
        sys.stdout.write(sys.stdin.read())
        print("at the end", file=sys.stderr)
    elif what == "wait":
        print("waits", flush=True)
        time.sleep(100)
    elif what == "signal":
        os.kill(os.getpid(), int(sys.argv[2]))
        time.sleep(100)
    elif what == "fail":
        raise ValueError("failed")
    else:
        sys.exit(int(what) if what.isdigit() else what)


if __name__ == "__main__":
    main()
