"""PipeGrid and Tahoe-LAFS's gateway side by side on the same servers; see ``__main__``."""
