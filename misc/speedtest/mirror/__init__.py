"""``pipegrid mirror`` and other mirroring tools, in turns, on the same web servers."""
