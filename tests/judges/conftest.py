"""The programs and fronts are for processes of their own."""

collect_ignore = ["fronts", "programs"]
