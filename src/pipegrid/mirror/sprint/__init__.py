"""Fetching without a reactor while all goes well; ``sprint`` is where to begin."""
