"""`aiodist doctor`: what is there, what works, what is missing and how to mend it.

here    this host
hosts   each of several hosts: what a job there needs of it
report  what was found, and how it is printed
"""

from aiodist.doctor.here import ask, ask_ranks, examine
from aiodist.doctor.hosts import HostsReport, Question, examine_hosts, show_hosts
from aiodist.doctor.report import Answer, Finding, Report, State, show

__all__ = [
    "Answer",
    "Finding",
    "HostsReport",
    "Question",
    "Report",
    "State",
    "ask",
    "ask_ranks",
    "examine",
    "examine_hosts",
    "show",
    "show_hosts",
]
