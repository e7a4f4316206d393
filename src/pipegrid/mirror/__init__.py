"""Package archives from several mirrors over pipelined HTTP: incremental, verified, crash-safe."""

HIDDEN = ".pipegrid-mirror"
"""In the destination: what is not published yet, the lock, what is known to be good."""

MANIFEST = "manifest"
"""In ``HIDDEN``: what the last complete run wanted."""

NEW_MANIFEST = "manifest.new"
"""In ``HIDDEN``: what one wants that has begun to give files their names, and is not complete."""
