"""Whole trees, PipeGrid and Tahoe-LAFS's commands side by side; see ``__main__``."""
