"""The command ``jackfield bench``, which evaluates checkpoints of a run on sets of held-out tasks."""
