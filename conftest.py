"""Root of the test run: the three linked folders are collected once, through the package.

`aiodist/_core.py` only raises: what is tested is the extension beside it.
"""

collect_ignore = ["handles", "streams", "nn", "aiodist/_core.py"]
