"""Servers whose clock shows 1970, or centuries to come: they start, say so, and store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from misc.command import environment
from misc.speedtest.server import Connection, Server
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.log_file import line
from pipegrid.core import base32, clamped_dates
from pipegrid.storage import share_file
from pipegrid.storage.lease_check_log import why_wrong
from pipegrid.storage.mutable import slot_file as mutable_containers
from pipegrid.storage.share_file import NEVER_S, Expiry
from pipegrid.storage.share_store import Advisories
from pipegrid.wire.storage_messages import LeaseSecrets

YEAR_S = 31_556_952
FAR = {year: (year - 1970) * YEAR_S + 86400.0 for year in (2126, 2326, 11533)}
REASON = b"\xa1freasonax"  # CBOR: {"reason": "x"}
SECRETS = LeaseSecrets(b"r" * 32, b"c" * 32)

# As Python's clock is there: it counts nanoseconds in 64 bits, which end in 2262.
SERVE = """
import os, sys, time
_, directory, far, jumped, how = sys.argv
far, real, real_time = float(far), time.clock_gettime, time.time

def date():
    return far if os.path.exists(jumped) else real_time()

def wall():
    if date() * 1e9 >= 1 << 63:
        raise OverflowError("timestamp too large to convert to C _PyTime_t")
    return date()

time.time = wall
time.time_ns = lambda: int(wall() * 1e9)
time.clock_gettime = lambda clock: date() if clock == time.CLOCK_REALTIME else real(clock)
options = ["--port", "tcp:0:interface=127.0.0.1"]
if how == "twist":
    from twisted.application.twist._twist import Twist
    Twist.main(["twist", "--log-format=text", "pipegrid", "-d", directory, *options])
else:
    from pipegrid.cli import main
    sys.argv = ["pipegrid", "-d", directory, "serve", *options]
    main()
"""


class ServerTests(SynchronousTestCase):
    """``pipegrid serve``, and ``twist pipegrid``, with such a clock, on one directory."""

    def serve(self, directory: str, now: float, how: str = "serve", jumps: bool = False) -> str:
        """
        Serve, store and read a share, end; returns what the server has logged.

        Args:
            jumps: the clock is set when the server has been running for a while.
        """
        flag = Path(self.mktemp())
        if not jumps:
            flag.touch()
        with subprocess.Popen(
            [sys.executable, "-c", SERVE, directory, str(now), str(flag), how],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                said = ""
                while "#v=1" not in said:
                    said = process.stdout.readline()
                    self.assertTrue(said, "it ended")
                (address,) = [word for word in said.split() if "#v=1" in word]
                self.store(Server("far", address, 0))
                if jumps:
                    flag.touch()
                    self.store(Server("far", address, 0))
            finally:
                process.terminate()
                said = "".join(process.communicate(timeout=60))
        self.assertIn(process.returncode, (0, -signal.SIGTERM) if how == "twist" else (0,), said)
        self.assertNotIn("Traceback", said)
        return said

    def test_it_serves(self) -> None:
        """It does what it does in other years, and says once that the clock is wrong."""
        directory = self.mktemp()
        for now in (86400.0, *FAR.values()):
            said = self.serve(directory, now)
            self.assertEqual(said.count("the clock of this machine is wrong"), 1, said)

    def test_a_clock_that_jumps(self) -> None:
        """One that is set to such a date while a server runs stops nothing."""
        directory = self.mktemp()
        for year in (2326, 11533):
            self.serve(directory, FAR[year], jumps=True)

    def test_twist(self) -> None:
        """The plugin goes on when the clock is set; ``twist`` itself does not start with such a clock."""
        self.serve(self.mktemp(), FAR[2326], "twist", jumps=True)

    def store(self, server: Server) -> None:
        """Store a share, and read it."""
        index = os.urandom(16)
        requests = [
            server.allocate(index, 5),
            server.write(index, 0, b"bytes"),
            server.read(index, 0, 5),
            server.request(
                "POST", f"/storage/v1/immutable/{base32.encode(index)}/0/corrupt", body=REASON
            ),
        ]
        connection = Connection(server.address)
        self.addCleanup(connection.close)
        answers = list(connection.exchange(iter(requests), len(requests), 1))
        self.assertEqual([status for status, _ in answers], [200, 201, 206, 200])
        self.assertEqual(answers[2][1], b"bytes")


class LeaseTests(SynchronousTestCase):
    """A lease has 32 bits for the date when it ends, which are up in 2106."""

    def ends(self, now: float) -> set[int]:
        """Return when leases of all kinds end that are made now, as they are stored."""
        made = share_file.make_lease(2, 0, SECRETS, now).pack()
        packed = share_file.pack_lease(2, 0, SECRETS, now)
        mutable = mutable_containers.make_lease(2, SECRETS, bytes(20), now).pack()
        return {
            share_file.RECORDS.expiry(made, 0),
            share_file.RECORDS.expiry(packed, 0),
            mutable_containers.RECORDS.expiry(mutable, 0),
        }

    def test_they_saturate(self) -> None:
        """What would end later never ends; what would have ended before 1970 is no lost record."""
        for now in FAR.values():
            self.assertEqual(self.ends(now), {NEVER_S})
        self.assertEqual(self.ends(-1e12), {1})
        self.assertEqual(self.ends(0), {share_file.LEASE_DURATION_S})

    def test_they_never_run_out(self) -> None:
        """No date is after theirs, whatever the policy."""
        for now in FAR.values():
            for expiry in (Expiry(), Expiry(duration_s=1), Expiry(renewed_since=int(now))):
                self.assertLessEqual(expiry.threshold(now), NEVER_S)
            record = share_file.pack_lease(2, 0, SECRETS, now)
            self.assertIsNone(share_file.RECORDS.longest_expired(record, now))


class DateTests(SynchronousTestCase):
    """What is shown of dates that no calendar has."""

    def test_nearest(self) -> None:
        """The first or the last, and every other one as it is."""
        self.assertEqual(f"{clamped_dates.utc(1e300):%Y-%m-%d}", "9999-12-30")
        self.assertEqual(clamped_dates.utc(-1e300).year, 1)
        self.assertEqual(f"{clamped_dates.utc(FAR[2326]):%Y}", "2326")

    def test_lines_of_the_log(self) -> None:
        """They have such a date."""
        for when in (-1e300, *FAR.values(), 1e300):
            event = {
                "log_time": when,
                "log_format": "said",
                "log_level": SimpleNamespace(name="info"),
            }
            self.assertIn(" said", line(event))

    def test_advisories(self) -> None:
        """They are kept under such a date."""
        directory = self.mktemp()
        for when in (-1.0, *FAR.values()):
            self.assertTrue(
                Advisories(directory, partial(float, when)).keep(b"i" * 16, 0, "x", True)
            )
        self.assertEqual(len(list(Path(directory).iterdir())), 1 + len(FAR))

    def test_what_is_wrong(self) -> None:
        """1970, and what leases cannot hold; today may be right."""
        self.assertIsNone(why_wrong(1_790_000_000.0))
        self.assertIn("it shows 1970-01-01", why_wrong(1.0) or "")
        self.assertIn("never expire", why_wrong(FAR[2126]) or "")
