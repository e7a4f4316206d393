"""Directories on a grid: paths, listings, walks, and whole trees that come and go."""
