"""
The recorded conversations of ``vectors/webapi.json``, replayed on ten storage servers of Tahoe-LAFS.

Both gateways are asked: ours, and Tahoe-LAFS's own, which shows that the player itself is right. Run it with
``make interop``.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from misc.speedtest.gateways import our_gateway
from misc.speedtest.peers.__main__ import make_client
from misc.speedtest.peers.nodes import HTTPS, PROTOCOLS, Gateway, StorageNodes
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from tests import vectors
from tests.gateway.webapi_replay import Replay, delete_shares_below, sequences


class RecordedWebApiTests(SynchronousTestCase):
    """All steps but those of level ``quirk``, which are played and not judged."""

    def setUp(self) -> None:
        self.about: dict[str, Any] = vectors.load("webapi")["about"]
        self.root = Path(self.mktemp()).absolute()
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)
        self.servers = self.stack.enter_context(StorageNodes(self.root, self.about["servers"]))

    def play(self, directory: Path) -> list[str]:
        """Play all conversations with the gateway of a directory; returns what differs."""
        token = (directory / "private/api_auth_token").read_text().strip()
        url = (directory / "node.url").read_text().strip()
        replay = Replay(url, token, f"{time.time_ns():x}", delete_shares_below(self.root))
        chosen = os.environ.get("SEQUENCES", "").split()
        return [
            str(each)
            for sequence in sequences()
            if not chosen or sequence["name"] in chosen
            for each in replay.play(sequence)
            if each.level != "quirk"
        ]

    def write_secret(self, directory: Path) -> None:
        """Give a client's directory the recorded convergence secret."""
        (directory / "private").mkdir(parents=True, exist_ok=True)
        (directory / "private/convergence").write_text(self.about["convergence"] + "\n")

    def test_our_gateway(self) -> None:
        """Over either protocol."""
        for protocol in PROTOCOLS:
            client = self.root / f"client-{protocol}"
            make_client(client, self.servers.addresses(), protocol)
            self.write_secret(client)
            with our_gateway(client):
                wrong = self.play(client)
            self.assertEqual(wrong, [], protocol + "\n" + "\n".join(wrong))

    def test_the_other_gateway(self) -> None:
        """It answers as it did when it was recorded."""
        about = self.about
        params = Params(about["shares_needed"], about["shares_total"])
        directory = self.root / "gateway"
        self.write_secret(directory)
        gateway = Gateway(directory, self.servers.addresses(), HTTPS, params, about["shares_happy"])
        with gateway:
            wrong = self.play(directory)
        self.assertEqual(wrong, [], "\n".join(wrong))
