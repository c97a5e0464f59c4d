"""`aiodist doctor`: what is there, what works, what is missing and how to mend it."""
