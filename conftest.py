"""Root of the test run: the three linked folders are collected once, through the package.

`aiodist/_core.py` only raises: what is tested is the extension beside it. `aiodist/c10d/lightning.py` needs Lightning.
"""

collect_ignore = ["handles", "streams", "nn", "aiodist/_core.py", "aiodist/c10d/lightning.py"]
