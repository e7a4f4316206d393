"""The codec's speed test runs, verifies what it measures, and reports what it promises."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from io import StringIO

from misc.speedtest import codec
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoder import convergent_key
from pipegrid.errors import PipegridError


class CodecTests(SynchronousTestCase):
    """``misc/speedtest/codec.py`` in its tiny mode; no figure is judged."""

    def test_the_json_report_holds_figures_and_their_bound(self) -> None:
        """One object on one line."""
        out = StringIO()
        self.assertEqual(codec.main(["--tiny", "--json"], out), 0)
        [line] = out.getvalue().splitlines()
        report = json.loads(line)
        self.assertEqual(report["scenario"], "codec")
        for name in ("sha256", "aes", "encode_1", "encode_2", report["coder_best"]):
            figure = report["figures"][name]
            self.assertTrue(0 < figure["low"] <= figure["median"] <= figure["high"], name)
        self.assertGreater(report["bound_one_thread"], 0)

    def test_the_bound_is_the_time_of_the_primitives(self) -> None:
        """6.33 bytes hashed, one ciphered and one coded for each byte of plaintext, at 3 of 10."""
        speeds = {"sha256": 1900.0, "aes": 3000.0, "zfec_a": 200.0, "zfec_b": 300.0}
        figures = {name: codec.Figure((speed,)) for name, speed in speeds.items()}
        result = codec.Result(codec.PARAMS, 1, figures, {})
        self.assertEqual(result.best_coder, "zfec_b")
        self.assertAlmostEqual(result.bound, 1 / (19 / 3 / 1900 + 1 / 3000 + 1 / 300))

    def test_a_wrong_encoder_is_not_measured(self) -> None:
        """What is measured is compared with a recorded file first."""
        with ThreadPoolExecutor(2) as pool:
            codec.verify(pool)
            right = convergent_key
            self.patch(codec, "convergent_key", lambda *args: right(*args)[::-1])
            self.assertRaises(PipegridError, codec.verify, pool)

    def test_the_table_names_every_figure(self) -> None:
        """A person sees medians, spread, page faults and the bound."""
        out = StringIO()
        self.assertEqual(codec.main(["--tiny"], out), 0)
        text = out.getvalue()
        for words in (*codec.NAMES.values(), "of the bound", "times one thread", "faults/MB"):
            self.assertIn(words, text)
