"""Looking after many objects as one pipeline."""
