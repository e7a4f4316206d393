"""Flow control and its companions, useful to any Twisted program."""
