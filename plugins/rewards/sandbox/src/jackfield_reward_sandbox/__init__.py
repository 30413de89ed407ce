"""A reward that runs model-written code against tests, isolated."""
