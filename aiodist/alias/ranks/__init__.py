"""The folder that `aiodist run --as` adds to PYTHONPATH. Python imports `sitecustomize` from it at the start."""
