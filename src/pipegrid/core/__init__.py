"""The file format, as pure functions and classes: no reactor, clock, file or thread."""
