"""Tahoe-LAFS's web API: turns requests into operations on a grid, and their results into responses."""
