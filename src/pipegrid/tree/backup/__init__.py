"""Backups: directories stored again and again, of which only what has changed is read and sent."""
