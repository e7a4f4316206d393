"""Tahoe-LAFS's web API: requests to operations on a grid, and their results to responses."""
