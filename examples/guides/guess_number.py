"""An environment of one's own, and a workflow that gives hints of its own."""

from __future__ import annotations

import random
import re
from typing import Any

from jackfield_agent_workflow import MultiTurnWorkflow
from jackfield_environments import Step


class GuessNumber:
    """Asks for a number, and says whether a guess is too low or too high."""

    def __init__(self, largest: int = 20, guesses: int = 6) -> None:
        self.largest, self.guesses = largest, guesses

    def reset(self, *, seed: int | None = None) -> str:
        """Think of a number."""
        self.number, self.left = random.Random(seed).randint(1, self.largest), self.guesses
        return f"Guess a number from 1 to {self.largest}."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a guess: text, reward, terminated, truncated, and information for the program."""
        self.left -= 1
        right = action == str(self.number)
        low = action.isdigit() and int(action) < self.number
        text = "Right." if right else "Too low." if low else "Too high."
        return text, float(right), right, self.left == 0, {"won": right}


class GuessWorkflow(MultiTurnWorkflow):
    """Reads the last number of an answer, and pays a little less for each guess."""

    def parse_action(self, text: str) -> str:
        """Return the last number, or nothing."""
        return (re.findall(r"\d+", text) or [""])[-1]

    def step_reward(self, step: Step, turn: int) -> float:
        """Return the environment's reward less 0.02 for each guess before."""
        return step.reward - 0.02 * turn
