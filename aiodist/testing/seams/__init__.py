"""The ten places where tests may reach below the public calls; each module names at most eight things.

What a module here names keeps its name and its behaviour when the code below it is cut in another way. Tests import no
other internal module, but those that hold values and rules alone (tests/packaging/test_seams.py has the list).
"""
