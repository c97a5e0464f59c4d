"""The programs are for processes of their own."""

collect_ignore = ["programs"]
