"""Package archives from several mirrors over pipelined HTTP: incremental, verified, crash-safe."""

HIDDEN = ".pipegrid-mirror"
"""A directory in the destination: unpublished files, the lock, and records of verified files."""

MANIFEST = "manifest"
"""In ``HIDDEN``: the files that the last complete run wanted."""

NEW_MANIFEST = "manifest.new"
"""In ``HIDDEN``: the files of a run that has begun to publish and is not complete."""
