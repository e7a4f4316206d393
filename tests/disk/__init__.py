"""Tests of ``pipegrid.disk``."""
