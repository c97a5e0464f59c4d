"""`aiodist doctor`: what is installed, what works, what is missing and how to fix it. `aiodist explain`: errors."""
