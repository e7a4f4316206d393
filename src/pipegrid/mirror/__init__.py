"""
A package mirror: fetches archives from several servers over pipelined HTTP; incremental, verified and
crash-safe.
"""

HIDDEN = ".pipegrid-mirror"
"""A directory in the destination: unpublished files, the lock, and records of verified files."""

MANIFEST = "manifest"
"""In ``HIDDEN``: the files that the last complete run wanted."""

NEW_MANIFEST = "manifest.new"
"""In ``HIDDEN``: the files that an incomplete run wants; renamed to ``MANIFEST`` when the run is complete."""
