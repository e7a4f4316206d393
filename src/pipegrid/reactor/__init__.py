"""What is about the event loop: TLS, sockets, workers, wake-ups, traces; useful to any Twisted program."""
