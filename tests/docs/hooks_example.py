"""The hook of ``docs/plugins/index.md``."""

from __future__ import annotations

# [example
from jackfield.plugins import hookimpl
from jackfield.plugins.hooks import StepEnded


@hookimpl
def step_ended(event: StepEnded) -> None:
    """Called after each step of the trainer."""
    if event.metrics["policy/loss"] > 10:
        print(f"step {event.step}: the loss is {event.metrics['policy/loss']:.3g}")


# example]
