"""Requests of an endpoint: penalties, biases, grammars and likeliest tokens, against the model's own logits."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import GenerateRequest, RolloutContext, SamplingParams
from jackfield.errors import PluginError, RolloutError
from jackfield_chat_model import END, save_chat_model
from jackfield_huggingface.shaping import FIELDS, Grammar, ShapedRequest, ShapedResult, Shaping
from jackfield_rollout_transformers.config import Config
from jackfield_rollout_transformers.server import TransformersServer
from jackfield_rollout_transformers.shaping import Grammars
from jackfield_testing import in_loop, refused

PROMPT = tuple(b"what is it? it is")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the tiny chat model."""
    folder = str(tmp_path_factory.mktemp("chat"))
    save_chat_model(folder)
    return folder


def request(shaping: Shaping, name: str = "a", **sampling: Any) -> GenerateRequest:
    chosen = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 24, **sampling})
    return ShapedRequest(request_id=name, prompt_ids=PROMPT, sampling=chosen, shaping=shaping)


async def started(folder: str, **settings: Any) -> TransformersServer:
    server = TransformersServer(Config(**settings), RolloutContext(model=ModelSpec(path=folder)))
    await server.start()
    return server


def expected(folder: str, shaping: Shaping, count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probs from plain passes in float64, by vLLM's definitions."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokens: list[int] = []
    log_probs: list[float] = []
    for number in range(count):
        with torch.inference_mode():
            found = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
        logits = found.clone()
        for token, bias in shaping.logit_bias.items():
            logits[token] += bias
        if number < shaping.min_tokens:
            logits[END] = -math.inf
        for token in {*PROMPT, *tokens}:
            factor = shaping.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(tokens):
            logits[token] -= shaping.presence_penalty + shaping.frequency_penalty * tokens.count(token)
        tokens.append(int(logits.argmax()))
        log_probs.append(float(logits.log_softmax(-1)[tokens[-1]]))
        if tokens[-1] == END:
            break
    return tokens, log_probs


SHAPINGS = {
    "frequency": Shaping(frequency_penalty=1.5),
    "presence": Shaping(presence_penalty=2.0),
    "repetition": Shaping(repetition_penalty=1.4),
    "bias": Shaping(logit_bias={ord("x"): 4.0, ord("y"): -100.0}, frequency_penalty=0.5),
    "end": Shaping(logit_bias={END: 100.0}, min_tokens=5),
}


@in_loop
async def test_logits_are_shaped_as_vllm_defines_it(chat_model: str) -> None:
    """Together in one batch, and with a plain request beside them, which is not changed."""
    import asyncio

    server = await started(chat_model)
    try:
        plain = GenerateRequest(
            request_id="plain", prompt_ids=PROMPT, sampling=SamplingParams(temperature=0.0, max_new_tokens=24)
        )
        asked = [request(shaping, name) for name, shaping in SHAPINGS.items()]
        found = await asyncio.gather(*(server.generate(each) for each in (plain, *asked)))
    finally:
        await server.stop()
    differ = set()
    for result, shaping in zip(found, (Shaping(), *SHAPINGS.values()), strict=True):
        tokens, log_probs = expected(chat_model, shaping, 24)
        assert tuple(tokens) == result.token_ids, shaping
        assert result.log_probs == pytest.approx(log_probs, abs=1e-3), shaping
        differ.add(result.token_ids)
    assert len(SHAPINGS) + 1 == len(differ), "each shaping changes something"
    assert (6, "stop") == (len(found[-1].token_ids), found[-1].finish_reason)


@in_loop
async def test_likeliest_tokens_are_of_the_distribution_that_is_drawn_from(chat_model: str) -> None:
    server = await started(chat_model)
    shaping = Shaping(top_log_probs=4, prompt_log_probs=True)
    try:
        whole = await server.generate(request(shaping, "whole", temperature=0.7, top_k=3, seed=1))
        chunks = [
            each async for each in server.generate_stream(request(shaping, "s", temperature=0.7, top_k=3, seed=1))
        ]
    finally:
        await server.stop()
    assert isinstance(whole, ShapedResult)
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float64)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *whole.token_ids]])).logits[0]
    for place, (token, value, top) in enumerate(zip(whole.token_ids, whole.log_probs, whole.likeliest, strict=True)):
        kept = (logits[len(PROMPT) - 1 + place] / 0.7).topk(3)
        assert kept.indices.tolist() == [each for each, _ in top], "the filter leaves three"
        assert kept.values.log_softmax(-1).tolist() == pytest.approx([each for _, each in top], abs=1e-3)
        assert value == pytest.approx(dict(top)[token], abs=1e-6)
    raw = logits.log_softmax(-1)
    assert len(PROMPT) - 1 == len(whole.prompt)
    for place, (value, rank, top) in enumerate(whole.prompt):
        token = PROMPT[place + 1]
        assert value == pytest.approx(float(raw[place, token]), abs=1e-3)
        assert rank == int((raw[place] > raw[place, token]).sum()) + 1
        assert raw[place].topk(4).indices.tolist() == [each for each, _ in top]
    parts: list[Any] = chunks
    assert whole.likeliest == tuple(each for chunk in parts for each in chunk.likeliest)
    assert [whole.prompt, ()] == [parts[0].prompt, parts[1].prompt]


@in_loop
async def test_an_answer_matches_its_grammar(chat_model: str) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "hot": {"type": "boolean"}}}
    schema |= {"required": ["city", "hot"], "additionalProperties": False}
    server = await started(chat_model)
    try:
        for seed in range(3):
            shaping = Shaping(grammar=Grammar("json", json.dumps(schema)))
            result = await server.generate(request(shaping, temperature=1.0, seed=seed, max_new_tokens=100))
            assert "stop" == result.finish_reason
            found = json.loads(bytes(result.token_ids[:-1]))
            assert {"city", "hot"} == set(found)
            assert found["city"] in ("Rome", "Oslo")
            shaping = Shaping(grammar=Grammar("regex", "(yes|no)!"))
            result = await server.generate(request(shaping, temperature=1.0, seed=seed))
            assert bytes(result.token_ids[:-1]) in (b"yes!", b"no!")
        with pytest.raises(RolloutError) as caught:
            await server.generate(request(Shaping(grammar=Grammar("regex", "("))))
        assert ("rollout.request", "response_format") == (caught.value.code, caught.value.where)
    finally:
        await server.stop()


@in_loop
async def test_what_is_not_served_is_refused_by_name(chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without the extra ``grammar``, and a token that the model does not have."""
    monkeypatch.setattr(TransformersServer, "shaping", FIELDS - {"grammar"})
    server = await started(chat_model)
    try:
        with pytest.raises(PluginError) as refused:
            await server.generate(request(Shaping(grammar=Grammar("regex", "a"))))
        assert ("plugin.capability", "grammar") == (refused.value.code, refused.value.where)
        with pytest.raises(RolloutError) as caught:
            await server.generate(request(Shaping(logit_bias={264: 1.0})))
        assert "logit_bias of token 264" in str(caught.value.found)
    finally:
        await server.stop()


def test_a_shaping_names_what_it_changes() -> None:
    assert frozenset() == Shaping().wanted
    changed = attrs.evolve(Shaping(), min_tokens=1, logit_bias={1: 2.0})
    assert {"min_tokens", "logit_bias"} == changed.wanted


def test_a_tokenizer_that_no_grammar_can_be_matched_with_is_named() -> None:
    """llguidance knows the usual decoders alone; such a request is refused, as where it is not installed."""
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("a", " "), decoders.Fuse()])
    grammars = Grammars(lambda: PreTrainedTokenizerFast(tokenizer_object=tokenizer), 2, frozenset({1}))
    with refused("plugin.capability", "cannot match a grammar", "llguidance"):
        grammars.matcher(Grammar("regex", "a"))
