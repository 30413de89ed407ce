"""Help with writing config files: a first one with comments, and a JSON Schema for editors."""
