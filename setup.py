"""What pyproject.toml cannot say: the extension `aiodist._core`, which build_backend/ compiles."""

from aiodist_build import settings
from setuptools import setup

setup(**settings())
