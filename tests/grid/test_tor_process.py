"""``[tor] launch = true``: a Tor of this program; a script and a port of this process take its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from pipegrid.errors import UsageError
from pipegrid.grid import tor_process
from pipegrid.grid.strict_config import RefusedSetting, read_config
from pipegrid.grid.tor_process import LaunchedTor
from pipegrid.grid.tor_socks_settings import connection_policy
from pipegrid.reactor.connection_policy import ProxyAddress, ProxyWay
from pipegrid.reactor.process_settings import TOR_START
from pipegrid.reactor.tcp_socks5_endpoints import ProxyError
from tests.server.test_onion_service import FakeTor

SCRIPT = """\
#!/bin/sh
echo "$@" >> {log}
while [ $# -gt 0 ]; do [ "$1" = --ControlPortWriteToFile ] && file=$2; shift; done
echo PORT=127.0.0.1:{port} > $file
exec sleep 100
"""


class LaunchedTorTests(TestCase):
    """Starting, sharing and ending it."""

    timeout = 60

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.tor = FakeTor()
        loop: Any = reactor
        listening = loop.listenTCP(0, self.tor, interface="127.0.0.1")
        self.addCleanup(listening.stopListening)
        self.addCleanup(self.gone)
        self.port = listening.getHost().port
        self.log = self.directory / "log"
        self.log.touch()
        self.said: list[str] = []
        self.patch(TOR_START, "tell", self.said.append)

    def program(self, text: str) -> str:
        """Return a program that takes the place of Tor."""
        path = self.directory / "program"
        path.write_text(text.format(log=self.log, port=self.port))
        path.chmod(0o755)
        return str(path)

    def launched(self, executable: str) -> LaunchedTor:
        """Return what starts it; it is ended after the test."""
        tor = LaunchedTor(self.directory, executable)
        self.addCleanup(tor.stop)
        return tor

    async def _gone(self) -> None:
        while self.tor.connections:
            await deferLater(reactor, 0.005)

    def gone(self) -> Deferred[None]:
        """Wait until no connection to the control port is left."""
        return Deferred.fromCoroutine(self._gone())

    def starts(self) -> list[str]:
        """Return the arguments of each start."""
        return self.log.read_text().splitlines()

    def ask(self, tor: LaunchedTor) -> Deferred[tuple[ProxyAddress, ...]]:
        """Ask where its SOCKS port is."""
        return Deferred.fromCoroutine(tor.socks_addresses(reactor))

    def test_it_is_shared(self) -> Deferred[None]:
        """One start for all who ask meanwhile and later, and another after it has ended."""
        return Deferred.fromCoroutine(self._test_it_is_shared())

    async def _test_it_is_shared(self) -> None:
        self.tor.phases = ["PROGRESS=10 TAG=conn", "PROGRESS=100 TAG=done"]
        tor = self.launched(self.program(SCRIPT))
        found = await gatherResults([self.ask(tor), self.ask(tor)])
        self.assertEqual(found[0][0], ProxyAddress("127.0.0.1", 9055))
        self.assertEqual(found[0], found[1])
        (address,) = await tor.control_addresses(reactor)
        self.assertEqual(address, ProxyAddress("127.0.0.1", self.port))
        self.assertEqual(len(self.starts()), 1)
        self.assertIn(f"--DataDirectory {self.directory}/tor-1 --SocksPort auto", self.starts()[0])
        self.assertIn(f"--__OwningControllerProcess {os.getpid()}", self.starts()[0])
        self.assertEqual(self.said, ["Tor is starting: 10 %"])
        self.assertEqual(self.tor.taken, 1)
        self.tor.connections[0].transport.abortConnection()
        while tor._socks:
            await deferLater(reactor, 0.005)
        await self.ask(tor)
        self.assertEqual(len(self.starts()), 2)

    def test_two_programs(self) -> Deferred[None]:
        """Each has a directory of its own, as many as may run; the lock is Tor's until it ends."""
        return Deferred.fromCoroutine(self._test_two_programs())

    async def _test_two_programs(self) -> None:
        self.patch(tor_process, "MAX_DIRECTORIES", 2)
        program = self.program(SCRIPT)
        first, second = self.launched(program), self.launched(program)
        await self.ask(first)
        await self.ask(second)
        self.assertIn("/tor-2 ", self.starts()[1])
        with self.assertRaisesRegex(ProxyError, "2 programs have a Tor in"):
            await self.ask(self.launched(program))
        first.stop()
        await self.ask(self.launched(program))
        self.assertIn("/tor-1 ", self.starts()[2])

    def test_it_does_not_start(self) -> Deferred[None]:
        """Each has its sentence, and no time limit is reached."""
        return Deferred.fromCoroutine(self._test_it_does_not_start())

    async def _test_it_does_not_start(self) -> None:
        missing = self.launched(str(self.directory / "nothing"))
        with self.assertRaisesRegex(UsageError, "there is no program .*nothing'; install it"):
            await self.ask(missing)
        self.patch(tor_process, "USUAL_NAMES", ("no-such-tor",))
        with self.assertRaisesRegex(UsageError, "launch is true, and Tor is not installed"):
            await self.ask(self.launched(""))
        (self.directory / "tor-1/torrc").mkdir(parents=True)
        program = self.program(SCRIPT)
        with self.assertRaisesRegex(UsageError, "what Tor needs in .*/tor-1: Is a directory; make"):
            await self.ask(self.launched(program))
        (self.directory / "tor-1/torrc").rmdir()
        Path(program).write_text("#!/no/such/shell\n")
        with self.assertRaisesRegex(UsageError, "cannot start .*/program: No such file .*; set"):
            await self.ask(self.launched(program))
        said = "echo 'Jan 1 [warn] bad option'\necho 'Jan 1 [err] Reading config failed'\n"
        ending = self.launched(self.program(f"#!/bin/sh\n{said}exit 1\n"))
        with self.assertRaisesRegex(ProxyError, "Tor has ended at its start: bad option"):
            await self.ask(ending)
        # It is not started again for each connection.
        with self.assertRaisesRegex(ProxyError, "bad option"):
            await self.ask(ending)
        self.assertIsNone(ending._process)

    def test_it_takes_too_long(self) -> Deferred[None]:
        """It is ended then."""
        return Deferred.fromCoroutine(self._test_too_long())

    async def _test_too_long(self) -> None:
        self.patch(tor_process, "START_S", 1.0)
        self.tor.phases = ["PROGRESS=5 TAG=conn"]
        tor = self.launched(self.program(SCRIPT))
        asked = self.ask(tor)
        while tor._process is None:
            await deferLater(reactor, 0.005)
        process = tor._process
        with self.assertRaisesRegex(ProxyError, r"did not start within 1 s \(5 %\)"):
            await asked
        self.assertEqual(process.poll(), -signal.SIGKILL)

    def test_settings(self) -> None:
        """It takes the place of a Tor that runs; what is neither true nor false is refused."""
        config = self.directory / "pipegrid.cfg"
        config.write_text("[connections]\ntcp = tor\n[tor]\nlaunch = true\ntor.executable = x\n")
        policies = [connection_policy(read_config(self.directory)[1], False) for _ in range(2)]
        for policy in policies:
            assert isinstance(policy.tcp, ProxyWay)
            self.assertEqual((policy.tcp.addresses, policy.tcp.isolates), ((), True))
            self.assertIs(policy.starting, policy.tcp.find)
        self.assertEqual(policies[0], policies[1])
        config.write_text("[tor]\nlaunch = perhaps\n")
        with self.assertRaisesRegex(RefusedSetting, "launch is 'perhaps'"):
            connection_policy(read_config(self.directory)[1], False)
