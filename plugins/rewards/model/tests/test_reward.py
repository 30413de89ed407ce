"""The agent against the library itself: scores, batches, long conversations, and folders that are no reward models."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from jackfield.abc.reward import ResponsePart, RewardContext, ScoreRequest, ScoreResult
from jackfield.plugins import discover
from jackfield.sdk import structure
from jackfield_reward_model.conformance import make_model
from jackfield_reward_model.model import RewardModel
from jackfield_reward_model.reward import ModelReward
from jackfield_reward_model.settings import Config
from jackfield_testing import in_loop, refused

_QUESTION = {"role": "user", "content": "what is it ?"}
_WORDS = ("good", "bad", "a", "word", "4", "the", "answer", "is")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny reward model."""
    place = tmp_path_factory.mktemp("model")
    make_model(place)
    return place


def agent_of(folder: Path, **settings: Any) -> ModelReward:
    options = {"path": str(folder), "device": "cpu", "dtype": "float64", **settings}
    return ModelReward(structure(Config, options), RewardContext())


def ask(text: str, **fields: Any) -> ScoreRequest:
    return ScoreRequest(data_source="test", solution_str=text, ground_truth="", **{"messages": (_QUESTION,), **fields})


def score(folder: Path, *requests: ScoreRequest, **settings: Any) -> list[ScoreResult]:
    async def main() -> list[ScoreResult]:
        agent = agent_of(folder, **settings)
        await agent.start()
        try:
            return list(await asyncio.gather(*map(agent.compute_score, requests)))
        finally:
            await agent.close()

    return asyncio.run(main())


def reference(folder: Path, text: str, longest: int | None = None) -> float:
    """The library's own score of one conversation, alone and without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    ids = tokenizer(f"<user> what is it ? <end><assistant> {text} <end>", add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        output: float = model.eval()(torch.tensor([ids[-longest:] if longest else ids])).logits.item()
    return output


def _texts(count: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(_WORDS, k=rng.randint(1, 30))) for _ in range(count)]


def test_the_plugin_is_found_and_passes_its_gates() -> None:
    loaded = discover().load("reward", "model")
    assert "jackfield_reward_model.reward.ModelReward" == f"{loaded.cls.__module__}.{loaded.cls.__name__}"


def test_scores_are_the_librarys_whatever_the_batch_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    plain = RewardModel.score

    def counted(self: RewardModel, batch: Sequence[Sequence[int]]) -> list[float]:
        sizes.append((len(batch), len(batch) * max(map(len, batch))))
        return plain(self, batch)

    monkeypatch.setattr(RewardModel, "score", counted)
    texts = _texts(24)
    expected = [reference(folder, text) for text in texts]
    alone = [score(folder, ask(text), batch_seconds=0.0)[0].score for text in texts[:4]]
    assert pytest.approx(expected[:4], abs=1e-12) == alone
    sizes.clear()
    found = score(folder, *map(ask, texts), batch_tokens=300)
    assert pytest.approx(expected, abs=1e-12) == [each.score for each in found]
    assert len(sizes) < len(texts)
    assert max(tokens for _, tokens in sizes) <= 300
    single = score(folder, *map(ask, texts), dtype="float32")
    assert pytest.approx(expected, abs=1e-4) == [each.score for each in single]


def test_cost_and_metrics(folder: Path) -> None:
    [found] = score(folder, ask("a good answer"))
    assert (11, {"truncated": 0.0, "tokens": 11.0}) == (found.tokens, found.metrics)
    assert found.seconds > 0.0


def test_outputs_are_shifted_and_scaled(folder: Path) -> None:
    [plain], [scaled] = score(folder, ask("good")), score(folder, ask("good"), shift=1.5, scale=2.0)
    assert pytest.approx(2.0 * ((plain.score or 0.0) + 1.5)) == scaled.score


def test_what_is_scored_of_a_response(folder: Path) -> None:
    parts = (ResponsePart(author="model", text="good "), ResponsePart(author="tool", text="4"))
    request = ask("good 4", parts=parts)
    [whole], [own] = score(folder, request), score(folder, request, response="model")
    assert pytest.approx([reference(folder, "good 4"), reference(folder, "good")]) == [whole.score, own.score]
    [text] = score(folder, ask("good", messages=(), prompt_str="what is it ?"))
    assert pytest.approx(reference(folder, "good")) == text.score


def test_long_conversations_are_refused_or_cut_from_the_left(folder: Path) -> None:
    text = " ".join(_WORDS * 10)
    short, refusal = score(folder, ask("good"), ask(text))
    assert ("ok", "failed", True) == (short.status, refusal.status, refusal.is_final)
    assert "[reward.model]" in str(refusal.error)
    [cut] = score(folder, ask(text), truncation="left")
    assert pytest.approx(reference(folder, text, 64)) == cut.score
    assert 1.0 == cut.metrics["truncated"]
    [shorter] = score(folder, ask(text), truncation="left", max_tokens=20)
    assert pytest.approx(reference(folder, text, 20)) == shorter.score


def test_a_conversation_that_the_template_refuses_is_a_final_failure(folder: Path) -> None:
    template = "{{ raise_exception('no system message') }}"
    [found] = score(folder, ask("good"), chat_template=template)
    assert ("failed", True) == (found.status, found.is_final)
    assert "no system message" in str(found.error)


@in_loop
async def test_the_event_loop_goes_on_while_the_model_computes(folder: Path) -> None:
    """The model waits for the loop: if the loop waited for the model, this would not end."""
    agent, entered, may_end = agent_of(folder), threading.Event(), threading.Event()
    await agent.start()
    model = agent._model
    assert model is not None
    plain = model.score

    def waiting(batch: Sequence[Sequence[int]]) -> list[float]:
        entered.set()
        may_end.wait()
        return plain(batch)

    model.score = waiting  # type: ignore[method-assign]
    first = asyncio.create_task(agent.compute_score(ask("good")))
    cancelled = asyncio.create_task(agent.compute_score(ask("bad")))
    while not entered.is_set():
        await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    may_end.set()
    assert "ok" == (await first).status
    await agent.close()


@in_loop
async def test_what_waits_at_the_end_is_cancelled(folder: Path) -> None:
    """Both what is in the batch that is computed, and what waits for the next one."""
    agent, entered, may_end = agent_of(folder, batch_tokens=1), threading.Event(), threading.Event()
    await agent.start()
    model = agent._model
    assert model is not None

    def waiting(batch: Sequence[Sequence[int]]) -> list[float]:
        entered.set()
        may_end.wait()
        return [0.0] * len(batch)

    model.score = waiting  # type: ignore[method-assign]
    calls = [asyncio.create_task(agent.compute_score(ask(text))) for text in ("good", "bad")]
    while not entered.is_set():
        await asyncio.sleep(0)
    closing = asyncio.create_task(agent.close())
    may_end.set()
    await closing
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in results[:1])
    assert all(call.done() for call in calls)


@in_loop
async def test_a_conversation_that_breaks_a_batch_fails_alone(folder: Path) -> None:
    agent = agent_of(folder)
    await agent.start()
    model = agent._model
    assert model is not None
    plain = model.score

    def scarce(batch: Sequence[Sequence[int]]) -> list[float]:
        if len(batch) > 1 or len(batch[0]) > 15:
            raise torch.OutOfMemoryError("out of memory")
        return plain(batch)

    model.score = scarce  # type: ignore[method-assign]
    requests = [ask("good"), ask(" ".join(_WORDS * 2)), ask("bad")]
    found = await asyncio.gather(*map(agent.compute_score, requests), return_exceptions=True)
    assert [ScoreResult, torch.OutOfMemoryError, ScoreResult] == [type(each) for each in found]
    await agent.close()


def test_an_output_that_is_no_number_is_a_failure(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    torch.nn.init.constant_(model.score.weight, float("nan"))
    model.save_pretrained(broken)
    [found] = score(broken, ask("good"))
    assert ("failed", None) == (found.status, found.score)


def test_a_model_that_learned_from_pairs_ranks_them(folder: Path, tmp_path: Path) -> None:
    """The loss of Bradley and Terry on pairs of responses, a good and a bad one."""
    learned = tmp_path / "learned"
    shutil.copytree(folder, learned)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rng, pairs = random.Random(1), []
    for _ in range(30):
        words = rng.choices(_WORDS[2:], k=4)
        pairs.append(tuple(" ".join([*words[:2], word, *words[2:]]) for word in ("good", "bad")))
    for _ in range(8):
        texts = [f"<user> what is it ? <end><assistant> {text} <end>" for pair in pairs[:20] for text in pair]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
        loss = -torch.nn.functional.logsigmoid(outputs[::2] - outputs[1::2]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(learned)
    found = score(learned, *(ask(text) for pair in pairs[20:] for text in pair))
    numbers = [each.score or 0.0 for each in found]
    assert all(good > bad for good, bad in zip(numbers[::2], numbers[1::2], strict=True)), numbers


def test_versions_are_those_of_the_files(folder: Path, tmp_path: Path) -> None:
    async def version(place: Path) -> str | None:
        agent = agent_of(place)
        await agent.start()
        try:
            return agent.version
        finally:
            await agent.close()

    same, other = tmp_path / "same", tmp_path / "other"
    shutil.copytree(folder, same)
    make_model(other, seed=1)
    first = asyncio.run(version(folder))
    assert first == asyncio.run(version(same))
    assert first != asyncio.run(version(other))


def _edited(folder: Path, place: Path, name: str, **changes: Any) -> Path:
    shutil.copytree(folder, place)
    content = json.loads((place / name).read_text())
    content |= changes
    (place / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return place


def test_folders_that_are_no_reward_models_are_refused(folder: Path, tmp_path: Path) -> None:
    """Each with what is wrong, at the start."""
    two, language, empty = tmp_path / "two", tmp_path / "language", tmp_path / "empty"
    make_model(two, labels=2)
    shutil.copytree(folder, language)
    config = Qwen3Config.from_pretrained(folder)
    Qwen3ForCausalLM(config).save_pretrained(language)
    (language / "config.json").write_text((folder / "config.json").read_text())
    shutil.copytree(folder, empty)
    (empty / "model.safetensors").unlink()
    shutil.copytree(folder, silent := tmp_path / "silent")
    (silent / "chat_template.jinja").unlink()
    small = tmp_path / "small"
    shutil.copytree(folder, small)
    AutoModelForSequenceClassification.from_config(Qwen3Config.from_pretrained(folder, vocab_size=16)).save_pretrained(
        small
    )
    wrong = {
        tmp_path / "nowhere": "config.json", two: "num_labels", language: "score.weight", empty: "cannot be loaded",
        _edited(folder, tmp_path / "unpadded", "tokenizer_config.json", pad_token=None): "padding",
        silent: "chat template", small: "16 tokens",
    }  # fmt: skip
    for place, word in wrong.items():
        agent = agent_of(place)

        async def start(agent: ModelReward = agent) -> None:
            try:
                await agent.start()
            finally:
                await agent.close()

        with refused("reward.model", word, place):
            asyncio.run(start())


def test_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    with refused("reward.model", "cuda:77"):
        score(folder, ask("good"), device="cuda:77")


def test_settings_can_be_read_without_torch() -> None:
    code = "import sys, jackfield_reward_model.settings, jackfield_reward_model.reward; "
    code += "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.strip()


@pytest.mark.needs("cuda")
def test_scores_of_a_gpu_are_those_of_the_processor(folder: Path) -> None:
    texts = _texts(16)
    expected = [reference(folder, text) for text in texts]
    for dtype, bound in (("float64", 1e-10), ("float32", 1e-3), ("auto", 0.3)):
        found = score(folder, *map(ask, texts), device="auto", dtype=dtype, batch_tokens=200)
        assert pytest.approx(expected, abs=bound) == [each.score for each in found]
