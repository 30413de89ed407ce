"""Data pipelines: operators over files and experiences, with versions and lineage."""

from jackfield_pipelines.experiences import ExperiencePipeline
from jackfield_pipelines.served_experiences import ServedPipeline
from jackfield_pipelines.tasks import prepare_tasks

__all__ = ["ExperiencePipeline", "ServedPipeline", "prepare_tasks"]
