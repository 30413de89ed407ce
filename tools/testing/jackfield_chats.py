# ruff: noqa: RUF001, DeepSeek's tokens have a fullwidth line in their names
"""Chat templates in the style of the model families, small tokenizers for them, and a model that says what it is told.

The templates are in ``core/tests/data/templates``. Each is written for these tests, and does what the family's own
template does to turns: which tokens end them, where tools and reasoning go, what it drops and trims.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield_testing import ROOT

TEMPLATES = ROOT / "core" / "tests" / "data" / "templates"
#: Like Qwen's and Llama's: a piece of punctuation takes the line breaks after it.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
CORPUS = [
    "user assistant system tool hello world answer. question?\n\n",
    "it is so.\n\nyes!\n\n\n",
    '{"name": "add"}\n\n',
]
QUESTION: Mapping[str, Any] = {"role": "user", "content": "What is it?"}
TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    },
)


@attrs.frozen
class Family:
    """A family of models: its template, its special tokens, and the tokens that its models end an answer with."""

    name: str
    special: tuple[str, ...]
    ends: tuple[str, ...]  #: the first is the tokenizer's end of text
    calls: bool = True  #: whether the template knows tools
    spaces: bool = False  #: whether the tokenizer is of the SentencePiece kind

    @property
    def template(self) -> str:
        """Return the chat template."""
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_GEMMA = ("<eos>", "<end_of_turn>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK += tuple(f"<｜tool▁{part}▁{side}｜>" for part in ("calls", "call") for side in ("begin", "end"))
_DEEPSEEK += tuple(f"<｜tool▁{part}▁{side}｜>" for part in ("outputs", "output") for side in ("begin", "end"))
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_MISTRAL += ("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_PHI = ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>")
_PHI += ("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>")
_OSS = ("<|endoftext|>", "<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>")

FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2_5", _CHATML, ("<|im_end|>", "<|endoftext|>")),
        Family("qwen3", _CHATML, ("<|im_end|>", "<|endoftext|>")),
        Family("llama3", _LLAMA, ("<|eot_id|>", "<|eom_id|>")),
        Family(
            "gemma", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<eos>", "<end_of_turn>"), calls=False
        ),
        Family("glm4", _GLM, ("<|endoftext|>", "<|user|>", "<|observation|>")),
        Family("deepseek", _DEEPSEEK, ("<｜end▁of▁sentence｜>",)),
        Family("mistral", _MISTRAL, ("</s>",), spaces=True),
        Family("phi4", _PHI, ("<|endoftext|>", "<|end|>")),
        Family("gpt_oss", (*_OSS, "<|constrain|>"), ("<|return|>", "<|endoftext|>", "<|call|>")),
        Family("plain", ("<|endoftext|>",), ("<|endoftext|>",), calls=False),
    )
}


@functools.cache
def raw_tokenizer(family: Family, template: str | None = None) -> Any:
    """Return a small tokenizer of the transformers library with the family's special tokens and template."""
    raw = tokenizers.Tokenizer(models.BPE(byte_fallback=family.spaces))
    kept = list(family.special)
    if family.spaces:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        raw.decoder = decoders.Sequence(parts)
        kept += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = []
    else:
        pieces = pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated")
        raw.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(False, use_regex=False)])
        raw.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=kept, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_without_bytes(raw) if family.spaces else raw,
        eos_token=family.ends[0],
        additional_special_tokens=list(family.special),
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = family.template if template is None else template
    return made


def _without_bytes(raw: Any) -> Any:
    """Return the tokenizer with its byte tokens as ordinary ones, which the trainer takes only as special tokens."""
    import json

    content = json.loads(raw.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if not each["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def make_tokenizer(family: Family, template: str | None = None) -> HuggingFaceChatTokenizer:
    """Return the chat tokenizer of a family, with the end tokens that its generation config has."""
    raw = raw_tokenizer(family, template)
    return HuggingFaceChatTokenizer(raw, end_token_ids=raw.convert_tokens_to_ids(list(family.ends)))


def render(
    tokenizer: HuggingFaceChatTokenizer, messages: Sequence[Any], tools: Sequence[Any] = (), *, asks: bool = True
) -> str:
    """Return what the template itself makes of a conversation."""
    tools = [dict(each) for each in tools]
    text: str = tokenizer.tokenizer.apply_chat_template(
        [dict(each) for each in messages], tools=tools or None, tokenize=False, add_generation_prompt=asks
    )
    return text


def user(content: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def result(content: str, call: str = "call00001") -> dict[str, Any]:
    """Return the result of a tool call."""
    return {"role": "tool", "name": "add", "content": content, "tool_call_id": call}


def said(
    family: Family, content: str = "", *, thought: str = "", calls: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return an answer as a message: its text, its reasoning, and the arguments of its calls of the tool ``add``."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message["thinking" if family.name == "gpt_oss" else "reasoning_content"] = thought
    if calls:
        made = [
            {"id": f"call{number:05}", "type": "function", "function": {"name": "add", "arguments": dict(each)}}
            for number, each in enumerate(calls, 1)
        ]
        message["tool_calls"] = made
    return message


def spoken(tokenizer: HuggingFaceChatTokenizer, family: Family, answer: Mapping[str, Any]) -> str:
    """Return what a model of the family writes for an answer, up to its end token, which is included."""
    prompt = render(tokenizer, [QUESTION])
    text = render(tokenizer, [QUESTION, answer], asks=False)
    thought = answer.get("reasoning_content") or answer.get("thinking")
    prompt = prompt.rstrip() if not text.startswith(prompt) else prompt
    assert text.startswith(prompt), (prompt, text)
    text = text[len(prompt) :]
    if thought and thought not in text:
        text = f"<think>{thought}</think>{text}"
    end = re.compile("|".join(map(re.escape, family.ends))).search(text)
    if end is not None:
        return text[: end.end()]
    if family.name == "glm4":
        return text + ("<|observation|>" if answer.get("tool_calls") else "<|user|>")
    return text.removesuffix("\n\n") + family.ends[0]


class ScriptedModel:
    """A model that gives its answers, texts or token ids, in their order; it keeps what it was asked.

    A text is cut at the request's ``max_new_tokens``, with the finish reason ``length``. A stop text ends it, too.
    """

    def __init__(self, tokenizer: HuggingFaceChatTokenizer, *answers: str, log_prob: float = -0.5) -> None:
        self.tokenizer, self.answers, self.log_prob = tokenizer, list(answers), log_prob
        self.requests: list[GenerateRequest] = []
        self.given: list[tuple[int, ...]] = []  #: the tokens of each answer

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return the next answer."""
        self.requests.append(request)
        text = self.answers.pop(0)
        stops = [text.find(stop) + len(stop) for stop in request.sampling.stop if stop in text]
        token_ids = self.tokenizer.tokenizer.encode(text[: min(stops, default=None)], add_special_tokens=False)
        kept = tuple(token_ids[: request.sampling.max_new_tokens])
        self.given.append(kept)
        return GenerateResult(
            request_id=request.request_id,
            token_ids=kept,
            log_probs=(self.log_prob,) * len(kept),
            weight_versions=(len(self.requests),) * len(kept),
            finish_reason="stop" if len(kept) == len(token_ids) else "length",
        )
