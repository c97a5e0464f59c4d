"""aiodist under the name of another backend: `aiodist run --as gloo`, and the start-up hook for other starters."""
