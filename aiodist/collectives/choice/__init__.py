"""The selector, which chooses implementations by a table, table files, and the available implementations."""
