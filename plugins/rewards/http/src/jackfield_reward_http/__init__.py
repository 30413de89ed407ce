"""Rewards from any service behind HTTP."""
