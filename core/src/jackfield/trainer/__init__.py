"""The training loop, the explorer, the reward pipeline and their schedule."""
