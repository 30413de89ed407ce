"""The parts of algorithms, which are pure functions on tensors with names.

Tensors are float ``[B, T]`` over response tokens, unless a function says otherwise. ``response_mask`` (bool or float)
is 1 on the model's own tokens. Losses are normalised by counts of the whole batch (all micro-batches, all ranks):
``global_tokens`` on the mask and ``global_sequences``. The functions raise ``algorithm.unknown`` for a name,
``algorithm.input``, and ``algorithm.not-finite``, which names the first row. The package does not import torch.
"""

from __future__ import annotations

from jackfield.algorithms.advantages import advantages
from jackfield.algorithms.losses import LossSpec, policy_loss, prepare, resolve_loss
from jackfield.algorithms.registry import Part, names, part, register
from jackfield.algorithms.settings import Algorithm, algorithm

__all__ = [
    "Algorithm",
    "LossSpec",
    "Part",
    "advantages",
    "algorithm",
    "names",
    "part",
    "policy_loss",
    "prepare",
    "register",
    "resolve_loss",
]
