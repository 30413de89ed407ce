"""Jackfield: reinforcement-learning post-training of language models, built from plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jackfield.training import DAPO as DAPO
    from jackfield.training import DPO as DPO
    from jackfield.training import GRPO as GRPO
    from jackfield.training import PPO as PPO
    from jackfield.training import RLOO as RLOO
    from jackfield.training import SFT as SFT
    from jackfield.training import Result as Result
    from jackfield.training import Training as Training

__version__: str
_TRAINING = ("DAPO", "DPO", "GRPO", "PPO", "RLOO", "SFT", "Result", "Training")
__all__ = ["DAPO", "DPO", "GRPO", "PPO", "RLOO", "SFT", "Result", "Training", "__version__"]  # noqa: F822, looked up


def __getattr__(name: str) -> Any:
    """Look up the version and the classes of :mod:`jackfield.training` on first use: ``import jackfield`` is cheap."""
    if name == "__version__":
        from importlib.metadata import version

        return version("jackfield")
    if name in _TRAINING:
        from jackfield import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_TRAINING]
