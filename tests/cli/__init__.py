"""Tests of pipegrid.cli."""
