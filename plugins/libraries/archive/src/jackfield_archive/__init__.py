"""The archive of what a run has trained on: Parquet files to read, score again and learn from.

The controller of a run's queue writes them with ``queue.archive``. Each row is a sample with its values, and has
everything that the queue knew about it.
"""

from __future__ import annotations

from jackfield_archive.files import COLUMNS, Archive, files_of, read_samples, write_samples
from jackfield_archive.learning import write_tasks
from jackfield_archive.records import RewardRecords
from jackfield_archive.rows import ArchiveFile, RecordFile, ScoredRow, check_new, open_files
from jackfield_archive.scoring import load_reward, request_of, rescore

__all__ = [
    "COLUMNS",
    "Archive",
    "ArchiveFile",
    "RecordFile",
    "RewardRecords",
    "ScoredRow",
    "check_new",
    "files_of",
    "load_reward",
    "open_files",
    "read_samples",
    "request_of",
    "rescore",
    "write_samples",
    "write_tasks",
]
