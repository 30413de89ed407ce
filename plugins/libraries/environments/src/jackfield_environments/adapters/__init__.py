"""Adapters to environments of other libraries, each imported only if it is used."""
