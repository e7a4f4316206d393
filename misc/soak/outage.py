"""
What does it cost when servers go away in the middle of a tree, and come back?

The real commands (``backup``, ``put -r``, ``get -r``) work on a directory of some hundred files, on servers
behind relays. When a random number of bytes has passed, all connections are cut, and new ones are refused, as
by servers that were stopped; after so many seconds they come back. What must hold: the status is 0, nothing
is left out, what was stored comes back as it was, and no more passes than without the outage, and what was
under way once more.

    python -m misc.soak.outage [--kind put|backup|get] [--outage SECONDS] [--files N] [--seed S]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.protocols.portforward import ProxyFactory

from misc import ending
from misc.soak.kill_put import Violation
from misc.soak.tree_world import Counter, Ended, TreeWorld, described, make_tree, relay_to
from pipegrid.core.encoding_parameters import Params

KINDS = ("backup", "put", "get")
PARAMS = Params(2, 4)
SERVERS = 4
FILES = 400
SIZES = (30, 300, 3000, 30_000)
BOUNDS = ("--max-memory", "8MiB", "--jobs", "32")
WINDOW_BYTES = 8 << 20
"""What may be under way when the servers go, as shares, and so passes twice."""
_LOOK_S = 0.02


class OutageWorld(TreeWorld):
    """Servers that can all be out of reach for a while."""

    def __init__(self, reactor: Any, scratch: Path) -> None:
        super().__init__(reactor, scratch, SERVERS, PARAMS)
        self._open: set[Any] = set()
        self._relay_to = self._cut_relay

    def _cut_relay(self, port: int) -> ProxyFactory:
        """Return a relay whose connections can be cut."""
        relay = relay_to(port, self.counter)
        opened, questions = self._open, relay.protocol

        class Cuttable(questions):  # type: ignore[misc, valid-type]
            def connectionMade(self) -> None:
                opened.add(self)
                super().connectionMade()

            def connectionLost(self, reason: Any) -> None:
                opened.discard(self)
                super().connectionLost(reason)

        relay.protocol = Cuttable
        return relay

    async def outage(self, at_bytes: int, for_s: float) -> None:
        """Be out of reach for so long once so many bytes have passed."""
        counter: Counter = self.counter
        while counter.up + counter.down < at_bytes:
            await deferLater(self.reactor, _LOOK_S)
        ports = [relay.getHost().port for relay in self._relays]
        factories = [relay.factory for relay in self._relays]
        for relay in self._relays:
            await relay.stopListening()
        for each in list(self._open):
            each.transport.abortConnection()
        await deferLater(self.reactor, for_s)
        self._relays[:] = [
            self.reactor.listenTCP(port, factory, interface="127.0.0.1")
            for port, factory in zip(ports, factories, strict=True)
        ]


async def _round(
    world: OutageWorld, kind: str, source: Path, rng: random.Random, for_s: float
) -> str:
    """Play a round; returns what it took."""
    cap = ""
    target = world.scratch / "target"
    if kind == "get":
        cap = (await world.run("-q", "put", "-r", str(source))).out.strip()
        words = ["get", "-r", cap, "-o", str(target)]
    else:
        words = ["backup", str(source)] if kind == "backup" else ["put", "-r", str(source)]
    size = sum(path.stat().st_size for path in source.rglob("f*") if path.is_file())
    whole = size * PARAMS.total_shares // PARAMS.required_shares if kind != "get" else size
    at_bytes = rng.randrange(whole // 10, whole * 8 // 10)
    world.counter.begin()
    outage = Deferred.fromCoroutine(world.outage(at_bytes, for_s))
    ended: Ended = await world.run(*words[:1], *BOUNDS, *words[1:])
    await outage
    if ended.status or "left out" in ended.err:
        raise Violation(f"{kind}: status {ended.status}: {ended.err}")
    if ended.up + ended.down > 1.3 * whole + WINDOW_BYTES:
        raise Violation(f"{kind}: {ended.up + ended.down} bytes passed, of a tree of {whole}")
    if kind != "get":
        words = ["restore"] if kind == "backup" else ["get", "-r", ended.out.strip()]
        got = await world.run("-q", *words, "-o", str(target))
        if got.status:
            raise Violation(f"{kind}: it does not come back: {got.err}")
    if described(source) != described(target):
        raise Violation(f"{kind}: it does not come back as it was")
    shutil.rmtree(target)
    said = [line for line in ended.err.splitlines() if "second try" in line]
    return f"{kind}: cut at {at_bytes} of {whole}, {ended.up + ended.down} passed; {' '.join(said)}"


async def run(
    reactor: Any, kinds: Sequence[str], for_s: float, files: int, seed: int, out: TextIO
) -> int:
    """Play a round of each kind; returns 1 if any promise was broken."""
    rng = random.Random(seed)
    print(f"outage: {for_s:g} s, {files} files, seed {seed}", file=out, flush=True)
    broken = 0
    with tempfile.TemporaryDirectory(prefix="pipegrid-outage-") as directory:
        scratch = Path(directory)
        world = OutageWorld(reactor, scratch)
        try:
            await world.start()
            for kind in kinds:
                source = scratch / f"source-{kind}"
                make_tree(source, rng, [rng.choice(SIZES) for _ in range(files)])
                try:
                    print(" ", await _round(world, kind, source, rng, for_s), file=out, flush=True)
                except Violation as violation:
                    broken += 1
                    print(f"  BROKEN {violation}", file=out, flush=True)
        finally:
            await world.stop()
    print(f"{broken:6d} promises broken", file=out)
    return 1 if broken else 0


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--kind", action="append", choices=KINDS, help="[all]")
    parser.add_argument("--outage", type=float, default=70.0, help="seconds [70]")
    parser.add_argument("--files", type=int, default=FILES, help=f"[{FILES}]")
    parser.add_argument("--seed", type=int, default=None, help="[a new one]")
    options = parser.parse_args(arguments)
    seed = int.from_bytes(os.urandom(4), "big") if options.seed is None else options.seed
    numbers = options.outage, options.files, seed
    return ending.run(lambda reactor: run(reactor, options.kind or KINDS, *numbers, out))


if __name__ == "__main__":
    sys.exit(main())
