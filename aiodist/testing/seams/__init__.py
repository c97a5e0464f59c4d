"""The ten places where tests may reach below the public calls; each module names at most eight things.

The names of these modules keep their behaviour when the code below them changes. Tests import no other internal
module, except modules of values and rules (tests/packaging/test_seams.py has the list).
"""
