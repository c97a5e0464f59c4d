"""Which implementation an operation takes: the selector, its table and file, and what the ranks have in common."""
