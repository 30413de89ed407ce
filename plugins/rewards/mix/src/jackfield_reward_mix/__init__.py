"""A reward that mixes the named dimensions of other rewards."""
