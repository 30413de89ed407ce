"""An agent whose model calls tools and reads their results, turn by turn."""
