"""
Tahoe-LAFS's own gateway does on PipeGrid's servers, and on grids of both kinds, what it does on its own.

The same script runs on three grids of ten servers, over both protocols; what came of each step must not tell
which grid it was. Run it with ``make interop``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.interop import gateway_script, processes
from tests.interop.gateway_world import Kind, Protocol, World

SHARES = (3, 7, 10)  # needed, happy, total
GRIDS: dict[str, list[Kind]] = {
    "tahoe": ["tahoe"] * 10,
    "pipegrid": ["pipegrid"] * 10,
    "mixed": ["tahoe", "pipegrid"] * 5,
}
PROTOCOLS: tuple[Protocol, ...] = ("gbs", "foolscap")
PATIENCE_S = 900.0
"""On a machine that does other things as well the gateway takes servers for lost again and again."""


class GatewayTests(SynchronousTestCase):
    """One script, six times."""

    def test_no_difference(self) -> None:
        """Every step has the same outcome on all grids, over both protocols."""
        self.patch(processes, "PATIENCE_S", PATIENCE_S)
        root = Path(self.mktemp()).absolute()
        usual = self.outcomes(root / "tahoe", GRIDS["tahoe"])
        for grid in ("pipegrid", "mixed"):
            for protocol, outcome in self.outcomes(root / grid, GRIDS[grid]).items():
                for (step, what), (same_step, expected) in zip(
                    outcome, usual[protocol], strict=True
                ):
                    self.assertEqual(step, same_step)
                    self.assertEqual(what, expected, f"{step} on {grid} over {protocol}")

    def outcomes(self, root: Path, kinds: list[Kind]) -> dict[Protocol, list[tuple[str, Any]]]:
        """Run the script on a grid, over one protocol after the other."""
        world = World(root, kinds, SHARES)
        try:
            found = {}
            for protocol in PROTOCOLS:
                gateway = world.start_gateway(protocol)
                world.until_found(gateway)
                scratch = root / f"files-{protocol}"
                seed = f"{root.name} {protocol}"
                found[protocol] = gateway_script.run(world, gateway, scratch, seed)
            return found
        finally:
            world.stop()
