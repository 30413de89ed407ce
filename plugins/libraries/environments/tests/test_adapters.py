"""Adapters to other libraries: the real packages, each in a process and, where that is quick, in the event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jackfield.errors import AgentError, PluginError
from jackfield_environments import EnvironmentConfig, EnvironmentPool, Episode
from jackfield_testing import in_loop

pytestmark = pytest.mark.filterwarnings("ignore")  # other people's


@contextlib.asynccontextmanager
async def playing(name: str, run: str = "process", **settings: Any) -> AsyncIterator[Episode]:
    pool = EnvironmentPool(EnvironmentConfig(name=name, settings=settings, run=run, size=1))  # type: ignore[arg-type]
    try:
        async with pool.episode() as episode:
            yield episode
    finally:
        await pool.close()


@pytest.mark.parametrize("run", ["process", "inline"])
@in_loop
async def test_gymnasium(run: str) -> None:
    """A drawn lake, words for actions, the last of which counts; what is no action is not taken."""
    words = ["left", "down", "right", "up"]
    lake: Any = {"id": "FrozenLake-v1", "actions": words, "settings": {"is_slippery": False}}
    async with playing("gymnasium", run, instructions="Reach G.", **lake) as episode:
        seen = await episode.reset(seed=1)
        assert "Reach G.\n[S]FFF\nFHFH\nFFFH\nHFFG" == seen.text
        assert words == seen.info["actions"]
        wrong = await episode.step("Swim!")
        assert (False, 0.0, False) == (wrong.info["possible"], wrong.reward, wrong.ended)
        step = None
        for action in ("First left, no: right", "RIGHT", "down.", "down", "down", "right"):
            step = await episode.step(action)
        assert step is not None
        assert (1.0, True) == (step.reward, step.terminated)
        assert (await episode.reset(seed=1)).text == seen.text


@in_loop
async def test_gymnasium_without_drawings() -> None:
    """The observation's value is its text; actions are numbers; the episode may be cut."""
    async with playing("gymnasium", id="Blackjack-v1", max_steps=1) as episode:
        first = await episode.reset(seed=3)
        assert first.text.startswith("(")
        step = await episode.step("1")
        assert step.ended
        assert (await episode.reset(seed=3)).text == first.text


@pytest.mark.parametrize("settings", [{"id": "Pendulum-v1"}, {"id": "FrozenLake-v1", "actions": ["up"]}])
@in_loop
async def test_gymnasium_that_has_no_words_is_refused(settings: dict[str, Any]) -> None:
    async with playing("gymnasium", **settings) as episode:
        with pytest.raises(AgentError) as caught:
            await episode.reset()
        assert "agent.environment" == caught.value.code


@in_loop
async def test_reasoning_gym() -> None:
    """A question by seed, and the score of the only answer."""
    options: Any = {"task": "chain_sum", "settings": {"max_terms": 3}, "answer": r"#### (.+)"}
    async with playing("reasoning_gym", "inline", **options) as episode:
        one, other, again = [await episode.reset(seed=seed) for seed in (1, 2, 1)]
        assert one == again
        assert one.text != other.text
        right = await episode.step(f"I think so.\n#### {again.info['answer']}")
        assert (1.0, True, True) == (right.reward, right.terminated, right.info["won"])
        await episode.reset(seed=1)
        assert 1.0 > (await episode.step("no mark")).reward
    async with playing("reasoning_gym", "inline", task="nothing") as episode:
        with pytest.raises(AgentError) as caught:
            await episode.reset()
        assert "nothing" in str(caught.value.found)


@in_loop
async def test_textarena_alone() -> None:
    """The text grows with the game, and each game begins without the text of the one before."""
    async with playing("textarena", id="GuessTheNumber-v0") as episode:
        first = await episode.reset(seed=5)
        assert "between 1 and 20" in first.text
        low, high, step = 1, 20, None
        while low <= high and (step is None or not step.ended):
            guess = (low + high) // 2
            step = await episode.step(f"[{guess}]")
            low, high = (guess + 1, high) if step.text.rstrip().endswith("higher.") else (low, guess - 1)
        assert step is not None
        assert (True, 1.0, True) == (step.terminated, step.reward, step.info["won"])
        assert (await episode.reset(seed=5)).text == first.text


@in_loop
async def test_textarena_against_an_opponent() -> None:
    async with playing("textarena", id="TicTacToe-v0", players=2, opponent="first") as episode:
        seen = await episode.reset(seed=5)
        assert "You are Player 0" in seen.text
        moved = await episode.step("[4]")
        assert "Player 1 placed" in moved.text, "the opponent has moved, too"
        lost = await episode.step("I give up")
        while not lost.ended:
            lost = await episode.step("I give up")
        assert 0.0 >= lost.reward


@pytest.mark.timeout(120)
@in_loop
async def test_textworld() -> None:
    """A game by seed: commands, scores, and an end; it is compiled once."""
    async with playing("textworld", "inline", rooms=1, objects=2, quest_length=1) as episode:
        first = await episode.reset(seed=3)
        assert "look" in first.info["actions"]
        looked = await episode.step("look")
        assert "$" not in looked.text.splitlines()[-1]
        assert ">" not in looked.text
        again = await episode.reset(seed=3)
        assert again == first
        won = False
        for action in first.info["actions"]:
            await episode.reset(seed=3)
            step = await episode.step(action)
            won = won or (step.terminated and step.reward > 0 and step.info["won"])
        assert won, "one command is enough"


@in_loop
async def test_an_adapter_without_its_package_says_what_to_install() -> None:
    """These two do not install beside Jackfield; ``python`` gives them an interpreter of their own."""
    both: dict[str, dict[str, Any]] = {"openenv": {"url": "http://127.0.0.1:1"}, "verifiers": {"taskset": "sums"}}
    for (name, settings), package in zip(both.items(), ("openenv-core", "verifiers"), strict=True):
        async with playing(name, **settings) as episode:
            with pytest.raises(PluginError) as caught:
                await episode.reset()
        assert "plugin.requirement" == caught.value.code
        assert f"pip install {package}," in str(caught.value.fix)
