"""A reward by a reward model with a scalar head."""
