"""Data pipelines: operators over files and experiences, with versions and lineage."""
