"""The command ``jackfield gateway``."""
