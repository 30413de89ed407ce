"""The command ``jackfield trace``."""
