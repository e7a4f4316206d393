"""A kit for tests of Twisted programs: a network in virtual time, and emulated links for real sockets."""
