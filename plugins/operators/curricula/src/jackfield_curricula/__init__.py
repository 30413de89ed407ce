"""Curricula: pass-rate windows, adaptive difficulty, Thompson sampling and mixing by ability."""
