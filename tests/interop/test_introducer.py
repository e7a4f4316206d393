"""Our introducer between servers and clients of both kinds, in small."""

from __future__ import annotations

from tests.interop import introducer_grid


class FewServersTests(introducer_grid.IntroducerTurnsTests):
    """Two servers of each kind."""

    of_each_kind = 2


del introducer_grid
