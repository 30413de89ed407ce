"""An agent and a reward for Jackfield."""
