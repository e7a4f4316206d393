"""Attacks on a storage server, in small."""
