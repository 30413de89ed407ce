"""An agent that may try twice."""
