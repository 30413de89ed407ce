"""Rotary embeddings whose frequencies depend on the longest row of a pass: which rows may share one."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from jackfield.sdk.rotary import length_limits


class Rotary:
    """What a model's rotary embeddings make of the lengths of rows.

    The library takes the frequencies from the number of positions of a pass, and keeps those of the longest one so far.

    Args:
        model: as it was loaded.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.limits = length_limits(model.config.get_text_config().to_dict())
        self._stateful = [module for module in model.modules() if "dynamic" in self.limits and _keeps(module)]

    def side(self, length: int) -> tuple[int, ...]:
        """Rows of ``length`` tokens, prompt and response, share a pass with others of the same side only."""
        return tuple(
            0 if length <= limit else length if kind == "dynamic" else 1 for kind, limit in self.limits.items()
        )

    def reset(self) -> None:
        """Forget the frequencies of earlier passes."""
        for module in self._stateful:
            kinds: Any = module.rope_type
            for prefix in [f"{layer_type}_" for layer_type in kinds] if isinstance(kinds, dict) else [""]:
                original = getattr(module, f"{prefix}original_inv_freq", None)
                if original is not None:
                    setattr(module, f"{prefix}inv_freq", original.to(getattr(module, f"{prefix}inv_freq").device))
                    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _keeps(module: nn.Module) -> bool:
    return hasattr(module, "rope_type") and hasattr(module, "original_max_seq_len")
