"""Jackfield: reinforcement-learning post-training of language models, built from plugins.

``GRPO``, ``SFT`` and so on are those of the package jackfield-training, which is imported when one is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jackfield_training import DAPO, DPO, GRPO, PPO, RLOO, SFT, Result, Training

__version__: str
__all__ = ["DAPO", "DPO", "GRPO", "PPO", "RLOO", "SFT", "Result", "Training", "__version__"]


def __getattr__(name: str) -> Any:
    """Look up the version and the classes on first use: ``import jackfield`` is cheap."""
    if name == "__version__":
        from importlib.metadata import version

        return version("jackfield")
    if name in __all__:
        from importlib import import_module

        from jackfield.errors import PluginError

        try:
            return getattr(import_module("jackfield_training"), name)
        except ModuleNotFoundError as error:
            if error.name != "jackfield_training":
                raise
            raise PluginError(
                f"jackfield.{name} needs jackfield-training", fix="pip install jackfield-training"
            ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
