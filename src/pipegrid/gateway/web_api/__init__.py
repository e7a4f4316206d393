"""Tahoe-LAFS's web API: requests become operations on a grid, and their results become responses."""
