"""The attention implementation of an architecture, and the kinds of its layers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from jackfield_huggingface.names import auto_class

_BOUNDED = ("attn_logit_softcapping",)  #: settings of attention that the library applies in ``eager`` only


def choose_attention(folder: Path, given: str, trust_remote_code: bool = False) -> str:
    """Return the attention implementation for the model in ``folder``; ``given`` is the setting.

    ``auto`` is ``sdpa``, and ``eager`` where ``sdpa`` would compute something else (a soft cap of attention scores) or
    the architecture does not have it (attention sinks). The choice of ``eager`` is logged.
    """
    if given != "auto":
        return given
    reason = _needs_eager(folder, trust_remote_code)
    if reason is None:
        return "sdpa"
    logging.getLogger("jackfield").info("attention of %s is eager: %s", folder, reason)
    return "eager"


def _needs_eager(folder: Path, trust_remote_code: bool) -> str | None:
    from transformers import AutoConfig

    kind = auto_class(folder, trust_remote_code)
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    text = config.get_text_config()
    for name in _BOUNDED:
        if getattr(text, name, None) is not None:
            return f"its configuration has {name}"
    known = kind._model_mapping.get(type(config), None)
    if known is not None and not getattr(known, "_supports_sdpa", False):
        return f"{known.__name__} has no sdpa"
    return None


def layer_kinds(settings: Any) -> tuple[str, ...]:
    """Return the kinds of attention of a text configuration's layers, sorted, in the library's words."""
    listed = getattr(settings, "layer_types", None)
    if listed:
        return tuple(sorted(set(listed)))
    if getattr(settings, "sliding_window", None) is not None:
        return ("sliding_attention",)
    if getattr(settings, "attention_types", None):  # GPT-Neo: its local layers have a window of their own
        return tuple(sorted({f"{kind}_attention" for kind in settings.attention_layers}))
    return ("full_attention",)
