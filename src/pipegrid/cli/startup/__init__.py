"""What runs before click and Twisted are loaded: the process, plain command lines, connections ahead."""
