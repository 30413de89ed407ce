"""Models that learn to call tools: the examples of the guide, and the tokens of calls within real answers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.agent import AgentContext, AgentWorkerContext
from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield_agent_tool.agent import ToolAgent
from jackfield_agent_tool.settings import Config, InlineCall
from jackfield_commands import CommandServer
from jackfield_tools import Toolbox

from .conftest import ROOT, metrics

EXAMPLES = ROOT / "examples"
CALCULATOR = EXAMPLES / "calculator_tool" / "calculator.py"


def example(jackfield: CommandServer, name: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run an example; return the lines of its GRPO run."""
    file = str(EXAMPLES / name / f"{name}.py")
    done = jackfield.start(file, "--folder", str(folder), *arguments, program="python").wait(840)
    assert 0 == done.code, done.out[-4000:] + done.error[-4000:]
    return metrics(folder / "grpo")


def scores(lines: list[dict[str, Any]]) -> list[float]:
    return [line["score"] for line in lines if line["kind"] == "evaluation"]


@pytest.mark.timeout(900)
def test_a_model_learns_to_call_the_calculator(jackfield: CommandServer, tmp_path: Path) -> None:
    """From at most 0.4 after the warm-up to at least 0.9, on problems that it has not seen."""
    lines = example(jackfield, "calculator_tool", tmp_path / "run", "schedule.steps=8", "evaluation.every=8")
    found = scores(lines)
    assert found[0] <= 0.4, found
    assert found[-1] >= 0.9, found
    steps = [line for line in lines if line["kind"] == "step"]
    assert steps[0]["agent/tool_calls/mean"] < steps[-1]["agent/tool_calls/mean"]
    assert steps[-1]["agent/tools/calculate/errors/mean"] < 0.1


@pytest.mark.timeout(900)
def test_a_model_learns_to_ask_an_mcp_server(jackfield: CommandServer, tmp_path: Path) -> None:
    """A server over stdio, started by the run; the model asks it in turns of its chat template."""
    lines = example(jackfield, "mcp_tool", tmp_path / "run", "schedule.steps=8", "evaluation.every=8")
    found = scores(lines)
    assert found[0] <= 0.4, found
    assert found[-1] >= 0.9, found


# -- GSM8K's calculations as calls


class Gold:
    """A model that writes the answer of a record, and stops as a server does; results come from the tool."""

    def __init__(self, answer: str, tokenizer: HuggingFaceChatTokenizer) -> None:
        self.answer, self.tokenizer, self.place = answer, tokenizer, 0

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        if self.place and self.tokenizer.decode(request.prompt_ids).endswith(">>"):
            self.place = self.answer.index(">>", self.place) + 2
        stop = self.answer.find("=", self.place)
        end = len(self.answer) if stop < 0 else stop + 1
        ids = tuple(self.tokenizer.encode_text(self.answer[self.place : end]))
        ids += () if stop >= 0 else self.tokenizer.end_token_ids[:1]
        self.place = end
        count = len(ids)
        return GenerateResult(
            request_id=request.request_id,
            token_ids=ids,
            log_probs=(-0.5,) * count,
            weight_versions=(0,) * count,
            finish_reason="stop",
        )


def byte_tokenizer() -> HuggingFaceChatTokenizer:
    """A tokenizer with a token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    fast.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}"
        "{% else %}<assistant>{{ m['content'] }}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return HuggingFaceChatTokenizer(fast)


async def replay(records: list[dict[str, str]], folder: Path) -> tuple[int, int, int]:
    """Write the answers of records with the tool; return how many are as in the file, calls, and equal results."""
    tokenizer = byte_tokenizer()
    box = Toolbox(
        {"calculate": {"function": f"{CALCULATOR}:calculate"}}, AgentWorkerContext(tokenizer=tokenizer, folder=folder)
    )
    await box.start()
    mark = InlineCall(begin="<<", end="=", tool="calculate", argument="expression", result="{text}>>")
    same = calls = equal = 0
    for record in records:
        gold = Gold(record["answer"], tokenizer)
        context = AgentContext(generate=gold, tokenizer=tokenizer)
        session = box.session(context, {})
        context = AgentContext(generate=gold, tokenizer=tokenizer, tools=session)
        agent = ToolAgent(Config(format="inline", inline=(mark,), max_turns=64), context)
        output = await agent.run({"max_new_tokens": 4000}, messages=[{"role": "user", "content": record["question"]}])
        assert "answered" == output.end_reason
        [sequence] = output.sequences
        inserted: list[str] = []
        pairs = list(zip(sequence.response_ids, sequence.response_mask, strict=True))
        for place, (token, mask) in enumerate(pairs):
            if not mask:
                inserted[-1:] = [inserted[-1] + tokenizer.decode([token])] if place and not pairs[place - 1][1] else [
                    *inserted[-1:], tokenizer.decode([token])
                ]  # fmt: skip
        assert len(inserted) == len(output.tool_calls) == record["answer"].count("<<")
        assert all(text.endswith(">>") for text in inserted)
        written = [each.partition(">>")[0].rpartition("=")[2] for each in record["answer"].split("<<")[1:]]
        calls += len(inserted)
        equal += sum(_number(one) == _number(other) for one, other in zip(inserted, written, strict=True))
        same += tokenizer.decode(sequence.response_ids) == record["answer"]
        await session.close()
    await box.close()
    return same, calls, equal


def _number(text: str) -> float | str:
    """The file writes some results as 9.00 or .5."""
    try:
        return float(text.removesuffix(">>"))
    except ValueError:
        return text


@pytest.mark.needs_data("gsm8k")
def test_the_calculations_of_gsm8k_are_calls(tmp_path: Path, shared_data: Path) -> None:
    """Real answers: each `<<…=` is a call whose result has mask 0, and the text is as in the file."""
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:80]
    same, calls, equal = asyncio.run(replay([json.loads(line) for line in lines], tmp_path))
    assert calls > 200
    assert equal / calls > 0.98, (same, calls, equal)
    assert same > 70, (same, calls, equal)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("48/2", "24"),
        ("12/60", "0.2"),
        ("0.2*50", "10"),
        ("100-50-30-15", "5"),
        ("-(2+3)*4", "-20"),
        ("1,000+1", "1001"),
    ],
)
def test_the_calculator_of_the_example(expression: str, expected: str) -> None:
    spec = importlib.util.spec_from_file_location("calculator", CALCULATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert expected == module.calculate(expression)
    for wrong in ("1/0", "2**99", "open('x')", "1+", "9" * 300):
        with pytest.raises(ValueError, match=r"calculated|allowed|long"):
            module.calculate(wrong)
