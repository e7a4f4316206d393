"""Directories on a grid: paths, listings and walks, and the upload and download of whole directory trees."""
