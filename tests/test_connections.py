"""Every place in the package that connects or looks up a name: listed, with what keeps to the settings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

PACKAGE = Path(__file__).parent.parent / "src" / "pipegrid"

NAMES = {
    "Agent",
    "HTTPSConnection",
    "HostnameEndpoint",
    "TCP4ClientEndpoint",
    "TCP6ClientEndpoint",
    "UNIXClientEndpoint",
    "clientFromString",
    "connectSSL",
    "connectTCP",
    "connectUNIX",
    "connect_ex",
    "create_connection",
    "getaddrinfo",
    "getfqdn",
    "gethostbyaddr",
    "gethostbyname",
    "listenUDP",
    "urlopen",
}
"""What connects, or looks up names, in the standard library and in Twisted."""

_LOCAL = "connects to processes of this run, on this machine"
_NAMED = "measures an address of the command line, and is refused with a grid that is not reached directly"

PLACES = {
    "reactor/tcp_socks5_endpoints.py": "direct, or to the proxy itself: ``endpoint_through`` asks the policy",
    "reactor/preconnect.py": "preconnect_servers begins it only where the policy is direct",
    "http11/endpoints.py": "the agent of a program that chose no proxy; refuses names of Tor and I2P",
    "mirror/preconnect_mirrors.py": "only where the environment names no proxy; skips names of Tor and I2P",
    "mirror/mirror_lists.py": "only where the environment names no SOCKS proxy",
    "speedtest/child_processes.py": _LOCAL,
    "speedtest/link_proxies.py": "an emulated link, from and to where its command line says",
    "speedtest/traffic_recorder.py": "passes on what the reactor is asked",
    "speedtest/responder_client.py": _NAMED,
    "speedtest/benchmark_clients.py": "a gateway, named on the command line; not one of Tor or I2P",
}
"""By module; all other code that reaches servers takes a ``ConnectionPolicy``."""


def connecting(tree: ast.AST) -> set[str]:
    """Return the names in a module that connect or look up."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found & NAMES


class ConnectionsTests(SynchronousTestCase):
    """No code connects past the settings for connections."""

    def test_all_places_are_listed(self) -> None:
        """Whoever adds one says here why it keeps to the settings, or uses ``endpoint_through``."""
        found = {
            str(path.relative_to(PACKAGE))
            for path in PACKAGE.rglob("*.py")
            if connecting(ast.parse(path.read_text("utf-8")))
        }
        self.assertEqual(found, set(PLACES))

    def test_only_one_module_connects_directly(self) -> None:
        """``endpoint_for`` and ``AddressEndpoint`` are for ``endpoint_through``, which asks the policy."""
        users = {
            str(path.relative_to(PACKAGE))
            for path in PACKAGE.rglob("*.py")
            if re.search(r"\b(endpoint_for|AddressEndpoint)\b", path.read_text("utf-8"))
        }
        self.assertEqual(users, {"reactor/tcp_socks5_endpoints.py"})
