"""Measures operations against plain library calls in the same processes; `aiodist bench` is its command line."""
