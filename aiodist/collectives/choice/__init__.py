"""The choice of an implementation: the selector, its table and file, and facts common to all ranks."""
