"""Elastic worlds: ranks that leave and join, in the hub (`generations`), the launcher (`sessions`) and a rank."""
