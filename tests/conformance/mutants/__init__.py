"""References and deliberately broken implementations of each kind. Not shipped."""
