"""Additions to Twisted's event loop, for any program: TLS, sockets, worker threads, timers, traces."""
