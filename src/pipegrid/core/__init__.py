"""The file format as pure functions and classes, which use no reactor, clock, file or thread."""
