"""Uploads: from a source to acknowledged shares."""
