"""
Run tests with a pyOpenSSL whose private names are others, as another release's may be.

    python -m tests.renamed_pyopenssl tests.transport.test_gbs

It is the one that is installed, with each of these names changed in its source before that is compiled.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

RENAMED = {"_into_ssl": "_bio_in", "_from_ssl": "_bio_out", "_raise_ssl_error": "_raise_error"}


def rename() -> None:
    """Import ``OpenSSL.SSL`` with other names."""
    spec = importlib.util.find_spec("OpenSSL.SSL")
    assert spec is not None
    loader: Any = spec.loader
    source = loader.get_source("OpenSSL.SSL")
    for name, other in RENAMED.items():
        source, count = re.subn(rf"\b{name}\b", other, source)
        assert count, name
    module = importlib.util.module_from_spec(spec)
    sys.modules["OpenSSL.SSL"] = module
    exec(compile(source, str(spec.origin), "exec"), module.__dict__)
    import OpenSSL

    OpenSSL.SSL = module


if __name__ == "__main__":
    rename()
    from twisted.scripts.trial import run

    run()
