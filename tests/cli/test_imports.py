"""What a command and the library do not import, which is what they need not wait for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from misc.command import environment
from misc.speedtest.processes import Servers
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.speedtest.child_processes import FileEncoding

OF_OTHERS = (
    "foolscap",
    "http.client",
    "prometheus_client",
    "service_identity",
    "statistics",
    "treq",
    "twisted.internet.endpoints",
    "twisted.internet.stdio",
    "twisted.plugin",
    "twisted.web",
    "urllib.request",
    "zipfile",
)
"""Modules that neither the library nor a command over HTTPS has any use for."""

OF_TWISTED = (
    "OpenSSL",
    "argparse",
    "asyncio.base_events",
    "asyncio.events",
    "cryptography.hazmat.primitives.asymmetric",
    "cryptography.hazmat.primitives.serialization",
    "cryptography.x509",
    "email",
    "importlib.resources",
    "pty",
    "tempfile",
    "twisted.internet._sslverify",
    "twisted.protocols.tls",
    "twisted.python.sendmsg",
)
"""What Twisted imports wherever it is used, but for the process of a command; and the like of our own."""

OURS = (
    "pipegrid.core.packed_directory",
    "pipegrid.grid.client_creation",
    "pipegrid.grid.introducer_discovery",
    "pipegrid.grid.local_grid",
    "pipegrid.grid.server_tracing",
    "pipegrid.http11.agent",
    "pipegrid.testing",
    "pipegrid.speedtest",
    "pipegrid.storage.share_store",
    "pipegrid.transfer.check",
    "pipegrid.transfer.repair",
    "pipegrid.transport.surveys",
    "pipegrid.transport.throttle",
    "pipegrid.tree.directory_reading",
    "pipegrid.wire.gbs_mutable",
    "pipegrid.wire.gbs_surveys_releases",
)
OF_GETS = ("pipegrid.core.decoder", "pipegrid.transfer.get.download")
OF_PUTS = (
    "pipegrid.core.encoder",
    "pipegrid.transfer.put.uploader",
    "pipegrid.transfer.put.upload_loop",
)

MOST_OF_ATTRS = 30
"""Classes of attrs in a put or a get of a small file."""

_TELL = """
import json, sys
from pipegrid.cli.startup.lazy_modules import UnusedModule
used = [name for name, each in sys.modules.items() if not isinstance(each, UnusedModule)]
print(json.dumps(sorted(used)), file=sys.stderr)
"""
"""Tells the modules that were executed: what a command names and does not use is not."""

_TELL_ATTRS = """
import json, sys
from pipegrid.cli.startup.lazy_modules import UnusedModule
used = [each for each in sys.modules.items() if not isinstance(each[1], UnusedModule)]
print(json.dumps(sorted(
    f"{name}.{kind.__name__}"
    for name, each in used if name.startswith("pipegrid.")
    for kind in list(vars(each).values())
    if isinstance(kind, type) and kind.__module__ == name and "__attrs_attrs__" in vars(kind)
)), file=sys.stderr)
"""
"""Tells the package's classes that attrs has made."""


def _command(tell: str) -> str:
    """Return a program that runs a command line, and tells what is asked for at its end."""
    return f"""
import sys
from pipegrid.cli import main
sys.argv[0] = "pipegrid"
sys.settrace(lambda *_: None)  # so that the process ends the long way
try:
    main()
finally:
    exec({tell!r}, {{}})
"""


COMMAND = _command(_TELL)
"""Runs a command line, and tells its modules."""


def modules(*program: str) -> tuple[str, set[str]]:
    """Run Python; returns what it prints, and the modules that it tells at the end of stderr."""
    done = subprocess.run(
        [sys.executable, "-c", *program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip(), set(json.loads(done.stderr.splitlines()[-1]))


class ImportTests(SynchronousTestCase):
    """Each is a process of its own."""

    def assertAbsent(self, names: tuple[str, ...], loaded: set[str]) -> None:
        """None of these modules, nor of the packages, was loaded."""
        found = {
            name for name in loaded for each in names if name == each or name.startswith(f"{each}.")
        }
        self.assertEqual(found, set())

    def test_the_library(self) -> None:
        """``from pipegrid import Grid`` waits for no server, no protocol and no kind of transfer."""
        _, loaded = modules(
            "import json, sys\n"
            "from pipegrid import Grid\n"
            "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
        )
        self.assertIn("pipegrid.grid.file_grid", loaded)
        others = tuple(each for each in OF_OTHERS if each not in ("http.client", "urllib.request"))
        self.assertAbsent(others + OURS + OF_GETS + OF_PUTS + ("OpenSSL", "yaml"), loaded)

    def test_put_and_get(self) -> None:
        """A ``put`` over HTTPS loads what it needs, a ``get`` too, and neither what the other does."""
        scratch = Path(self.mktemp()).absolute()
        scratch.mkdir()
        with Servers(
            2,
            encoding=FileEncoding.for_servers(2, Params(1, 2)),
            scratch=scratch,
            durability="none",
        ) as servers:
            file = scratch / "file"
            file.write_bytes(b"more than fifty-five bytes " * 9)
            start = (COMMAND, "-d", str(servers.client))
            cap, put = modules(*start, "put", str(file))
            content, got = modules(*start, "get", cap)
        self.assertEqual(content.encode(), file.read_bytes().strip())
        self.assertTrue(cap.startswith("URI:CHK:"), cap)
        for loaded, needed, other in ((put, OF_PUTS, OF_GETS), (got, OF_GETS, OF_PUTS)):
            self.assertEqual(set(needed) - loaded, set())
            self.assertAbsent(OF_OTHERS + OF_TWISTED + OURS + other, loaded)

    def test_classes_of_attrs_are_few(self) -> None:
        """attrs compiles methods for each at every start; CONTRIBUTING.md says what records are instead."""
        scratch = Path(self.mktemp()).absolute()
        tree = scratch / "tree"
        tree.mkdir(parents=True)
        (tree / "file").write_bytes(b"more than fifty-five bytes " * 9)
        with Servers(
            2,
            encoding=FileEncoding.for_servers(2, Params(1, 2)),
            scratch=scratch,
            durability="none",
        ) as servers:
            start = (_command(_TELL_ATTRS), "-d", str(servers.client))
            cap, put = modules(*start, "put", str(tree / "file"))
            _, got = modules(*start, "get", cap)
            modules(*start, "backup", str(tree), "--as", "tree")
            _, restored = modules(*start, "restore", "--as", "tree", "-o", str(scratch / "back"))
        self.assertIn("pipegrid.core.caps.ChkCap", put)
        for most, found in ((MOST_OF_ATTRS, put), (MOST_OF_ATTRS, got), (54, restored)):
            self.assertLessEqual(len(found), most, sorted(found))

    def test_what_a_backup_imports_before_it_connects(self) -> None:
        """Next to nothing: connections are made while the rest is imported."""
        _, loaded = modules(
            "from pipegrid.cli.startup.lazy_modules import load_own_modules_on_use\n"
            "load_own_modules_on_use()\n"  # as ``main`` does
            "from pipegrid.cli.startup import process\n"
            "run_process = process.run_process\n"  # executes it
            "def begin(job, invocation):\n"
            f"    exec({_TELL!r}, {{}})\n"
            "    return 0\n"
            "process.run_job = begin\n"
            "run_process(['backup', '/', '--as', 'all'])"
        )
        self.assertIn("pipegrid.cli.cmd_backup", loaded)
        absent = (
            "attr",
            "twisted.internet.defer",
            "pipegrid.core.caps",
            "pipegrid.tree.grid_paths",
        )
        self.assertAbsent(absent, loaded)

    def test_what_a_server_imports(self) -> None:
        """All that it uses, but not the library of invitations, which need not be installed."""
        _, loaded = modules(
            "from pipegrid.cli.startup.lazy_modules import bring_in, load_own_modules_on_use\n"
            "load_own_modules_on_use()\n"
            "from pipegrid.cli import cmd_serve, log_file\n"
            "bring_in(log_file, cmd_serve.serve, cmd_serve.systemd)\n"
            f"exec({_TELL!r}, {{}})"
        )
        self.assertIn("pipegrid.storage.share_store", loaded)
        self.assertAbsent(("wormhole",), loaded)


class OwnModulesTests(SynchronousTestCase):
    """The package's own modules, executed when they are used."""

    def output(self, program: str) -> str:
        """Run a program in a process of a command; returns what it prints."""
        done = subprocess.run(
            [
                *(sys.executable, "-c"),
                "import sys\n"
                "from pipegrid.cli.startup.lazy_modules import UnusedModule, load_own_modules_on_use\n"
                f"load_own_modules_on_use()\n{program}",
            ],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout.strip()

    def test_executed_when_used(self) -> None:
        """Not before, and it is the same module afterwards, to whoever imports it in whatever way."""
        self.assertEqual(
            self.output(
                "from pipegrid.core import base32\n"
                "import pipegrid.core.base32\n"
                "print(type(base32) is UnusedModule, 'encode' in vars(base32))\n"
                "print(base32.encode(b'a'), type(base32) is type(sys))\n"
                "from pipegrid.core.base32 import encode\n"
                "print(encode is base32.encode, sys.modules['pipegrid.core.base32'] is base32)"
            ),
            "True False\nme True\nTrue True",
        )

    def test_a_name_that_is_not_there(self) -> None:
        """It is missed as in any module."""
        self.assertEqual(
            self.output(
                "from pipegrid.core import base32\n"
                "print(hasattr(base32, 'nonsense'), hasattr(base32, 'encode'))\n"
                "try: from pipegrid.core.base32 import nonsense\n"
                "except ImportError as error: print('nonsense' in str(error))\n"
                "try: from pipegrid.core import nonsense\n"
                "except ImportError as error: print('nonsense' in str(error))"
            ),
            "False True\nTrue\nTrue",
        )

    def test_a_module_that_fails(self) -> None:
        """Each use tells why, and it is executed when that has passed."""
        self.assertEqual(
            self.output(
                "from pipegrid.core import base32\n"
                "begin = base32.__loader__._loader.exec_module\n"
                "fails = iter([True, True, False])\n"
                "def execute(module):\n"
                "    if next(fails): raise OSError('too many open files')\n"
                "    begin(module)\n"
                "base32.__loader__._loader.exec_module = execute\n"
                "for _ in range(3):\n"
                "    try: print(base32.encode(b'a'))\n"
                "    except OSError as error: print(error)"
            ),
            "too many open files\ntoo many open files\nme",
        )

    def test_threads(self) -> None:
        """A module is executed once, and who comes meanwhile gets all of it."""
        self.assertEqual(
            self.output(
                "import threading, time\n"
                "from pipegrid.core import base32\n"
                "begin, times, found = base32.__loader__._loader.exec_module, [], []\n"
                "def execute(module):\n"
                "    times.append(1)\n"
                "    time.sleep(0.1)\n"
                "    begin(module)\n"
                "base32.__loader__._loader.exec_module = execute\n"
                "use = lambda: found.append(base32.encode(b'a'))\n"
                "threads = [threading.Thread(target=use) for _ in range(5)]\n"
                "for each in threads: each.start()\n"
                "for each in threads: each.join()\n"
                "print(len(times), found)"
            ),
            "1 ['me', 'me', 'me', 'me', 'me']",
        )


class LaterTests(SynchronousTestCase):
    """``pipegrid.cli.startup.lazy_modules``, in processes of their own."""

    def run_after(self, *programs: str) -> list[str]:
        """
        Return what programs print that begin with the modules put off, and Twisted imported.

        Each is in a process of its own, forked from one that has done just that.
        """
        end = "end of program"
        done = subprocess.run(
            [
                *(sys.executable, "-W", "error::RuntimeWarning", "-c"),
                "import os, sys\n"
                "from pipegrid.cli.startup.lazy_modules import install_lazy_modules, tls_put_off\n"
                "install_lazy_modules()\n"
                "with tls_put_off():\n"
                "    from twisted.internet import defer, reactor\n"
                "assert not {'asyncio.events', 'OpenSSL', 'twisted.protocols.tls'} & set(sys.modules)\n"
                "for program in sys.argv[1:]:\n"
                "    if os.fork() == 0:\n"
                "        exec(program)\n"
                "        sys.exit()\n"
                "    if os.wait()[1]: sys.exit(program)\n"
                f"    print({end!r}, flush=True)\n",
                *programs,
            ],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return [each.strip() for each in done.stdout.split(f"{end}\n")[:-1]]

    def test_whoever_uses_it_gets_the_real_one(self) -> None:
        """Whatever way it is asked for."""
        programs = (
            ("import asyncio; print(asyncio.run(asyncio.sleep(0, 'slept')))", "slept"),
            ("from asyncio import Queue; print(Queue.__module__)", "asyncio.queues"),
            (
                "import asyncio.events, asyncio; asyncio.sleep; print(asyncio.events.__name__)",
                "asyncio.events",
            ),
            (
                "import asyncio.locks; from asyncio import sleep; import asyncio\n"
                "print(asyncio.locks.Lock is asyncio.Lock)",
                "True",
            ),
            (
                "import asyncio; loop = asyncio.new_event_loop()\n"
                "print(loop.run_until_complete(defer.succeed(5).asFuture(loop)))",
                "5",
            ),
            ("from http.cookiejar import CookieJar; print(len(CookieJar()))", "0"),
            ("from twisted.web.client import Agent; print(Agent.__name__)", "Agent"),
            ("from twisted.internet import ssl; print(ssl.Certificate.__name__)", "Certificate"),
            ("import treq; print(treq.get.__name__)", "get"),
            ("from zfec import cmdline_zfec; print(cmdline_zfec.main.__name__)", "main"),
            (
                "from twisted.internet.protocol import DatagramProtocol\n"
                "port = reactor.listenUDP(0, DatagramProtocol(), '127.0.0.1')\n"
                "print(type(port).__module__)",
                "twisted.internet.udp",
            ),
            (
                "from twisted.internet.threads import deferToThread\n"
                "both = [deferToThread(int, 7), reactor.resolve('localhost')]\n"
                "both = defer.gatherResults(both).addCallback(print)\n"
                "both.addBoth(lambda _: reactor.stop()); reactor.run()",
                "[7, '127.0.0.1']",
            ),
            (
                "from twisted.internet.utils import getProcessOutput\n"
                "said = getProcessOutput('/bin/echo', [b'hello']).addCallback(print)\n"
                "said.addBoth(lambda _: reactor.stop()); reactor.run()",
                "b'hello\\n'",
            ),
            ("import foolscap.api; print(foolscap.api.Tub.__name__)", "Tub"),
        )
        found = self.run_after(*(program for program, _ in programs))
        self.assertEqual(found, [printed for _, printed in programs])

    def test_the_reactors_tls(self) -> None:
        """Whoever has the reactor listen, connect or start TLS gets Twisted's; so do those that import it."""
        self.assertEqual(
            self.run_after(
                "from pipegrid.server import identity\n"
                "from twisted.internet import protocol, ssl\n"
                "class Server(protocol.Protocol):\n"
                "    def connectionMade(self): self.transport.write(b'hello')\n"
                "class Client(protocol.Protocol):\n"
                "    def connectionMade(self):\n"
                "        if started: self.transport.startTLS(ssl.ClientContextFactory())\n"
                "    def dataReceived(self, data):\n"
                "        print(data.decode())\n"
                "        reactor.stop() if started else connect(reactor.connectTCP, True)\n"
                "class Upgrading(Server):\n"
                "    def connectionMade(self): self.transport.startTLS(who), super().connectionMade()\n"
                "started = False\n"
                "who = identity.from_pem(identity.make_pem(), 'unused', 'test').contexts()\n"
                "Factory, ClientFactory = protocol.Factory, protocol.ClientFactory\n"
                "host = '127.0.0.1'\n"
                "first = reactor.listenSSL(0, Factory.forProtocol(Server), who, interface=host)\n"
                "second = reactor.listenTCP(0, Factory.forProtocol(Upgrading), interface=host)\n"
                "def connect(way, later):\n"
                "    global started\n"
                "    started = later\n"
                "    more = () if later else (ssl.ClientContextFactory(),)\n"
                "    port = (second if later else first).getHost().port\n"
                "    way(host, port, ClientFactory.forProtocol(Client), *more)\n"
                "reactor.callLater(50, reactor.stop)\n"
                "connect(reactor.connectSSL, False)\n"
                "reactor.run()\n"
                "from twisted.internet import posixbase\n"
                "from twisted.protocols.tls import TLSMemoryBIOFactory\n"
                "print(isinstance(TLSMemoryBIOFactory, type))"
            ),
            ["hello\nhello\nTrue"],
        )

    def test_coroutines(self) -> None:
        """What a coroutine is, Twisted is told as before."""
        self.assertEqual(
            self.run_after(
                "async def five(): return 5\n"
                "defer.Deferred.fromCoroutine(five()).addCallback(print)\n"
                "try: defer.Deferred.fromCoroutine(5)\n"
                "except defer.NotACoroutineError: print('no')"
            ),
            ["5\nno"],
        )

    def test_what_does_not_exist(self) -> None:
        """It is missed as always."""
        self.assertIn(
            "has no attribute 'nonsense'",
            self.run_after(
                "import asyncio\ntry: asyncio.nonsense\nexcept AttributeError as error: print(error)"
            )[0],
        )
