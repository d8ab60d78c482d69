"""Switches for tests, by environment variable; without one of them nothing in any engine changes."""
