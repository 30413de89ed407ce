"""Stands for the checks when pytest collects this package; see :mod:`jackfield_conformance.pytest_plugin`."""
