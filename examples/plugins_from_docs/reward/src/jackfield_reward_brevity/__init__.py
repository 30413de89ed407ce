"""Right answers, the shorter the better."""
