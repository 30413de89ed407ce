"""The commands of ``jackfield plugins`` that plugin authors use: ``doctor``, ``check`` and ``new``."""
