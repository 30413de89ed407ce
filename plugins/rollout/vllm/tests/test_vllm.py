"""The plugin keeps its contract on the real vLLM: the checks of the suite, through a process of vLLM's interpreter.

The environment: see ``environment.yaml`` beside this file. Without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import RolloutContext
from jackfield.errors import RolloutError
from jackfield.plugins import installed
from jackfield_conformance.registry import FIRST_BEHAVIOUR, Check, Subject, checks, run_check
from jackfield_conformance.support.rollout import LONG, Reader, greedy
from jackfield_conformance.support.rollout_model import model_folder
from jackfield_rollout_vllm.config import Config

from .conftest import Kept, descendants

# the first one waits for vLLM
pytestmark = [pytest.mark.shared_interpreter, pytest.mark.needs("vllm"), pytest.mark.timeout(400)]

_RECORD = installed().resolve("vllm", "rollout")
assert _RECORD.manifest is not None
CAPABILITIES = _RECORD.manifest.capabilities
#: Looks at what a server leaves behind; here, vLLM is left on purpose. See the last test.
NOT_KEPT = "ROL-100"


def applicable() -> list[Any]:
    """What the plugin has to pass."""
    return [
        pytest.param(check, id=check.id)
        for check in checks("rollout")
        if check.number >= FIRST_BEHAVIOUR
        and check.tier in ("base", "capability")
        and check.id != NOT_KEPT
        and check.applies("1.0", CAPABILITIES)
    ]


@pytest.mark.parametrize("check", applicable())
def test_the_contract_holds(check: Check, kept: Kept, tmp_path: Path) -> None:
    """Log-probabilities, before and after updates, are those of a plain forward pass in float64, within 1e-4."""
    subject = Subject(
        kind="rollout",
        name="vllm_kept",
        cls=lambda config, context: kept.server(context, **({} if config.openai is None else {"openai": {}})),
        config=Config(),
        config_class=Config,
        capabilities=CAPABILITIES,
        fixture={"checkpoint_engine": "shared"},
        folder=tmp_path,
    )
    outcome = run_check(check, subject)
    assert "passed" == outcome.status, outcome.message


async def _asked(url: str) -> list[Any]:
    """Ask for what the contract does not have; everything is greedy."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        fixed: Any = {"model": "any", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 12, "logprobs": 2}
        more: Any = {"return_token_ids": True, "ignore_eos": True}
        asked = [
            client.completions.create(**fixed, extra_body=more),
            client.completions.create(**fixed, frequency_penalty=1.5, extra_body=more),
            client.completions.create(**fixed, extra_body=more | {"repetition_penalty": 1.4}),
            client.completions.create(
                **fixed, logit_bias={"1": 100}, extra_body={"min_tokens": 3, "return_token_ids": True}
            ),
            client.completions.create(**fixed, echo=True, extra_body=more),
            client.completions.create(**fixed, extra_body={"structured_outputs": {"regex": "(ab|cd)e"}}),
        ]
        return [answer.choices[0] for answer in await asyncio.gather(*asked)]


def test_clients_of_openai_get_what_vllm_can_do(kept: Kept) -> None:
    """Penalties, biases and likeliest tokens against plain passes in float64; echo and a grammar."""

    async def life() -> list[Any]:
        server = kept.server(RolloutContext(model=ModelSpec(path=model_folder())), openai={})
        try:
            info = await server.start()
            return await _asked(str(info.openai_base_url))
        finally:
            await server.stop()

    plain, frequent, repeated, ended, echoed, regular = asyncio.run(life())
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float64)

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found = model(torch.tensor([[5, 6, 7, *tokens]])).logits[0, -1]
        return cast(torch.Tensor, found).clone()

    for choice, frequency, repetition in ((plain, 0.0, 1.0), (frequent, 1.5, 1.0), (repeated, 0.0, 1.4)):
        tokens = choice.model_extra["token_ids"]
        assert 12 == len(tokens)
        for place, token in enumerate(tokens):
            found, before = logits(tokens[:place]), tokens[:place]
            for each in {5, 6, 7, *before}:
                found[each] = found[each] / repetition if found[each] > 0 else found[each] * repetition
            for each in set(before):
                found[each] -= frequency * before.count(each)
            expected = found.log_softmax(-1)
            assert token == int(expected.argmax())
            assert float(expected[token]) == pytest.approx(choice.logprobs.token_logprobs[place], abs=1e-3)
            top = sorted(choice.logprobs.top_logprobs[place].values())
            assert expected.topk(2).values.flip(0).tolist() == pytest.approx(top, abs=1e-3)
    assert ([1], "stop") == (ended.model_extra["token_ids"][3:], ended.finish_reason)
    assert 3 + 12 == len(echoed.logprobs.tokens)
    raw = logits([]).log_softmax(-1)
    assert None is echoed.logprobs.token_logprobs[0]
    with torch.inference_mode():
        prompt = model(torch.tensor([[5, 6, 7]])).logits[0].log_softmax(-1)
    assert [float(prompt[0, 6]), float(prompt[1, 7])] == pytest.approx(echoed.logprobs.token_logprobs[1:3], abs=1e-3)
    assert float(raw.max()) == pytest.approx(echoed.logprobs.token_logprobs[3], abs=1e-3)
    assert regular.text in ("abe", "cde")


def test_a_core_that_dies_is_named_and_nothing_is_left(kept: Kept) -> None:
    """vLLM's core is killed during a request; then the replica ends with all that it has started.

    Comes last: it ends the session's vLLM.
    """

    async def life() -> set[int]:
        server = kept.server(RolloutContext(model=ModelSpec(path=model_folder())))
        await server.start()
        process = cast(Any, server.process)
        started = descendants(server.pid) | {server.pid}
        watched = {each: os.pidfd_open(each) for each in started}
        try:
            reader = Reader(server, greedy("running", LONG))
            await reader.at_least(2)
            (core,) = [each for each in started if "EngineCore" in Path(f"/proc/{each}/cmdline").read_text()]
            os.kill(core, signal.SIGKILL)
            with pytest.raises(RolloutError) as caught:
                await reader.result()
            assert caught.value.code in ("rollout.failed", "rollout.stopped")
            health = await server.health()
            assert not health.healthy
            assert "vLLM" in health.detail
            process.connection.end("was left")
            process.end()
            return {each for each, descriptor in watched.items() if not select.select([descriptor], [], [], 10.0)[0]}
        finally:
            process.end()
            for descriptor in watched.values():
                os.close(descriptor)

    assert set() == asyncio.run(life())
