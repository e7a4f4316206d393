"""
Tahoe-LAFS's own gateway does on PipeGrid's servers, and on grids of both kinds, what it does on its own.

The same script runs on three grids of ten servers, over both protocols; what came of each step must not tell
which grid it was. Run it with ``make interop``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests.interop import gateway_script
from tests.interop.gateway_world import Kind, Protocol, start_gateway, start_servers

GRIDS: dict[str, list[Kind]] = {
    "tahoe": ["tahoe"] * 10,
    "pipegrid": ["pipegrid"] * 10,
    "mixed": ["tahoe", "pipegrid"] * 5,
}
PROTOCOLS: tuple[Protocol, ...] = ("gbs", "foolscap")


class GatewayTests(SynchronousTestCase):
    """One script, six times."""

    timeout = 900

    def test_no_difference(self) -> None:
        """Every step has the same outcome on all grids, over both protocols."""
        outcomes: dict[tuple[str, Protocol], list[tuple[str, Any]]] = {}
        root = Path(self.mktemp()).absolute()
        for grid, kinds in GRIDS.items():
            here = root / grid
            here.mkdir(parents=True)
            servers = start_servers(here, kinds)
            try:
                for protocol in PROTOCOLS:
                    gateway = start_gateway(here, protocol, servers, protocol)
                    try:
                        scratch = here / f"{protocol}-files"
                        outcomes[grid, protocol] = gateway_script.run(
                            gateway, servers, scratch, f"{grid} {protocol}"
                        )
                    finally:
                        gateway.stop()
            finally:
                for server in servers:
                    server.stop()
        for (grid, protocol), outcome in outcomes.items():
            expected = outcomes["tahoe", protocol]
            for (step, what), (same_step, usual) in zip(outcome, expected, strict=True):
                self.assertEqual(step, same_step)
                self.assertEqual(what, usual, f"{step} on {grid} over {protocol}")
