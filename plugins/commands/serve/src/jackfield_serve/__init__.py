"""The commands ``jackfield serve`` and ``jackfield promote``: users are served while models change."""
