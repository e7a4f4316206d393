"""The file format: bytes and numbers in, bytes and decisions out. No reactor, clock or file."""
