"""Plain PyTorch on one CPU process."""
