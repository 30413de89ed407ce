"""Jackfield's training engine on VeOmni."""
