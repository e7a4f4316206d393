"""
A package mirror: fetches archives from several servers over pipelined HTTP; incremental, verified and
crash-safe.
"""

HIDDEN = ".pipegrid-mirror"
"""A directory in the destination: unpublished files, the lock, and records of verified files."""

MANIFEST = "manifest"
"""In ``HIDDEN``: the list of the files that the last complete run wanted."""

NEW_MANIFEST = "manifest.new"
"""In ``HIDDEN``: the list of an incomplete run's files; renamed to ``MANIFEST`` when the run is complete."""
