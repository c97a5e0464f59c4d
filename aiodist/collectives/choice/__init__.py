"""The choice of an implementation: the selector, with a table, a file, and facts common to all ranks."""
