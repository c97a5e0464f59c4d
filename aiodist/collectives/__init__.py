"""Executes a collective: programs of steps, over point-to-point messages or the library's own operations."""
