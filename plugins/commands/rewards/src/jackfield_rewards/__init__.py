"""The commands ``jackfield rewards serve``, ``status``, ``try`` and ``rescore``."""
