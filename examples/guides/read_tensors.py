"""A column of the samples that are in the queue, out of its database, without Jackfield."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import torch


def read_column(file: str, name: str) -> dict[str, torch.Tensor]:
    """Key to the tensor of a column, for each sample that has it."""
    query = "SELECT key, dtype, shape, content FROM jackfield_cells WHERE name = ?"
    with closing(sqlite3.connect(file)) as database:
        rows = database.execute(query, [name]).fetchall()
    found = {}
    for key, dtype, shape, content in rows:
        values = torch.empty(json.loads(shape), dtype=getattr(torch, dtype))
        values.reshape(-1).view(torch.uint8).numpy()[:] = memoryview(content)
        found[key] = values
    return found
