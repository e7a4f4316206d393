"""
A kit for tests of Twisted programs: a simulated network in virtual time, and emulated links for real sockets.
"""
