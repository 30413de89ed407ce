"""Operators on texts and numbers of rows that need no model."""
