"""Rewards by rule: exact match, regular expressions and mathematical equivalence."""
