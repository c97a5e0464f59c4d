"""A rank's life: `init`, `run` and `open`, and how it ends."""
