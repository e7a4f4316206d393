"""Pipelined HTTP/1.1 for any Twisted program: `PipelinedAgent`, and what it is made of."""
