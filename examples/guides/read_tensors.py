"""A column of the samples that are in the queue, out of its database, without Jackfield."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import torch


def read_column(file: str, name: str) -> dict[str, torch.Tensor]:
    """Key to the tensor of a column, for each sample that has it."""
    query = "SELECT key, type, content FROM jackfield_cells WHERE name = ?"
    with closing(sqlite3.connect(file)) as database:
        rows = database.execute(query, [name]).fetchall()
    found = {}
    for key, text, content in rows:
        kind, dtype, shape = json.loads(text)  # of one element, where the column is jagged
        values = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)) if content else torch.tensor([])
        found[key] = values.reshape([-1, *shape] if kind == "jagged" else shape)
    return found
