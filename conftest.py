"""Root of the test run: the three linked folders are collected once, through the package."""

collect_ignore = ["handles", "streams", "nn"]
