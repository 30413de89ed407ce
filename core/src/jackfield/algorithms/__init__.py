"""The parts of algorithms, which are pure functions on tensors with names.

Tensors are float ``[B, T]`` over response tokens, unless a function says otherwise. ``response_mask`` (bool or float)
is 1 on the model's own tokens. Losses are normalised by counts of the whole batch (all micro-batches, all ranks):
``global_tokens`` on the mask and ``global_sequences``. The functions raise ``algorithm.unknown`` for a name,
``algorithm.input``, and ``algorithm.not-finite``, which names the first row. The package does not import torch.
"""

from __future__ import annotations

from jackfield.algorithms.advantages import advantages
from jackfield.algorithms.losses import VALUE_LOSS, LossSpec, policy_loss, prepare, resolve_loss, value_loss
from jackfield.algorithms.per_token import aggregate, distillation_loss, kl
from jackfield.algorithms.registry import Part, names, part, register
from jackfield.algorithms.settings import Algorithm, algorithm
from jackfield.algorithms.shaping import (
    Correction,
    Shaping,
    clip_rewards,
    dynamic_sampling_filter,
    fill_failed,
    kl_in_reward,
    normalize_rewards,
    overlong_penalty,
)
from jackfield.algorithms.tensors import naming_rows
from jackfield.algorithms.weighted import chord_mu

__all__ = [
    "VALUE_LOSS",
    "Algorithm",
    "Correction",
    "LossSpec",
    "Part",
    "Shaping",
    "advantages",
    "aggregate",
    "algorithm",
    "chord_mu",
    "clip_rewards",
    "distillation_loss",
    "dynamic_sampling_filter",
    "fill_failed",
    "kl",
    "kl_in_reward",
    "names",
    "naming_rows",
    "normalize_rewards",
    "overlong_penalty",
    "part",
    "policy_loss",
    "prepare",
    "register",
    "resolve_loss",
    "value_loss",
]
