"""
Search for bytes that make a target fail.

    python -m misc.fuzz                         search for each target in turn, 600 s each
    python -m misc.fuzz TARGET [--seconds N]    search for one; further options are libFuzzer's
    python -m misc.fuzz TARGET --replay FILE... run the target on these files
    python -m misc.fuzz TARGET --keep           fill up what the repository keeps for it

Searching needs the extra ``fuzz`` (atheris). What is found goes to ``fuzz-results/TARGET``: new inputs to
``corpus``, those that fail beside it. How a finding becomes a test is told in ``docs/how-to-fuzz.md``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from misc import fuzz

RESULTS = Path("fuzz-results")
MEMORY_LIMIT_MB = 1024
INPUT_TIMEOUT_S = 20


def main(argv: list[str]) -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m misc.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("target", nargs="?", choices=sorted(fuzz.TARGETS))
    parser.add_argument("--seconds", type=int, default=600, help="how long to search (600)")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--keep", action="store_true")
    options, further = parser.parse_known_args(argv)
    if options.target is None:
        return search_all(argv)
    if options.replay:
        run = fuzz.load(options.target)
        for path in options.replay:
            run(path.read_bytes())
        return 0
    if options.keep:
        from misc.fuzz.keep import keep

        print(keep(options.target, RESULTS / options.target / "corpus"))
        return 0
    search(options.target, options.seconds, further)
    return 1  # not reached: a search ends the process


def search_all(options: list[str]) -> int:
    """Search for each target in a process of its own; return 1 if any has failed."""
    failed = []
    for target in sorted(fuzz.TARGETS):
        print(f"--- {target}", flush=True)
        if subprocess.run([sys.executable, "-m", "misc.fuzz", target, *options]).returncode:
            failed.append(target)
    print(f"failed: {', '.join(failed) or 'none'}; see {RESULTS}/")
    return 1 if failed else 0


def search(target: str, seconds: int, further: list[str]) -> None:
    """
    Fuzz until time is up or an input fails, then end the process.

    Args:
        further: options of libFuzzer, such as ``-jobs=2`` or ``-runs=1000``.
    """
    import atheris

    with atheris.instrument_imports(include=["pipegrid"]):
        run = fuzz.load(target)
    results = RESULTS / target
    corpus = results / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for name, data in fuzz.seeds(target).items():
        (corpus / f"seed-{name}").write_bytes(data)
    kept = fuzz.CORPUS / target
    arguments = [
        sys.argv[0],
        f"-max_total_time={seconds}",
        f"-max_len={fuzz.MAX_INPUT_BYTES}",
        f"-rss_limit_mb={MEMORY_LIMIT_MB}",
        f"-timeout={INPUT_TIMEOUT_S}",
        f"-artifact_prefix={results}/",
        "-print_final_stats=1",
        *further,
        str(corpus),
        *([str(kept)] if kept.is_dir() else []),
    ]
    atheris.Setup(arguments, run)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
