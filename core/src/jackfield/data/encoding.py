"""Tokens of tasks: prompts within their limit, and answers to train on with their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.abc.agent import ChatTokenizer
from jackfield.data.formats import Task, naming, refusal
from jackfield.data.tokens import HuggingFaceChatTokenizer, has_parts
from jackfield.sdk._messages import Messages as _Messages


def encode_inputs(tokenizer: ChatTokenizer, messages: _Messages) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """Return the tokens of a conversation, and the model's inputs beside tokens."""
    return tokenizer.encode_multi_modal(messages) if has_parts(messages) else (tokenizer.encode_chat(messages), {})


def tokenizer_of(tokenizer: ChatTokenizer, task: Task) -> ChatTokenizer:
    """Return the tokenizer that renders a task, with the task's own tools and variables of the template."""
    return tokenizer.of(task) if isinstance(tokenizer, HuggingFaceChatTokenizer) else tokenizer


def encode_prompt(tokenizer: ChatTokenizer, task: Task, limit: int | None, *, cuts: bool = False) -> tuple[int, ...]:
    """Encode a task's prompt of at most ``limit`` tokens (None: any number), else ``data.prompt-too-long``.

    ``cuts``: the last tokens of a longer prompt are used.
    """
    with naming(task.place or f"task {task.id}"):
        own = tokenizer_of(tokenizer, task)
        token_ids = tuple(task.tokens[0]) if task.tokens is not None else encode_inputs(own, task.messages)[0]
        return fitting(token_ids, limit, cuts=cuts and not has_parts(task.messages))


def fitting(token_ids: tuple[int, ...], limit: int | None, *, cuts: bool) -> tuple[int, ...]:
    """Return the tokens of a prompt, or with ``cuts`` the last ``limit``; else ``data.prompt-too-long`` if too many."""
    if limit is None or len(token_ids) <= limit:
        return token_ids
    if cuts:
        return token_ids[-limit:]
    expected, found = f"at most {limit} tokens", f"{len(token_ids)} tokens"
    fix = "set data.prompt_overflow to filter or truncate_left, leave this task out of the data, or raise "
    fix += "data.max_prompt_tokens or cluster.max_model_len"
    raise refusal("a prompt has too many tokens", expected, found, fix, "data.prompt-too-long")


def encode_answers(tokenizer: HuggingFaceChatTokenizer, task: Task) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Encode a task's answer and its rejected answer, if any; return tokens and mask of each."""
    encoded: list[tuple[Sequence[int], Sequence[int]]] = [] if task.tokens is None else [*task.tokens[1]]
    with naming(task.place or f"task {task.id}"):
        if task.response is None:
            raise refusal("a task has no answer to learn from", "an answer", "none", "set data.format")
        for answer in () if encoded else (task.response, task.rejected):
            if isinstance(answer, str):
                token_ids = tokenizer.encode_response(answer)
                encoded.append((token_ids, [1] * len(token_ids)))
            elif answer is not None:
                encoded.append(tokenizer.of(task).encode_completion(task.messages, answer))
    return encoded


def check_vocabulary(tokenizer: HuggingFaceChatTokenizer, model_vocabulary_size: int) -> None:
    """Raise ``data.vocabulary`` if the tokenizer has token ids that the model's embedding lacks.

    A model may have more embedding rows than the tokenizer has tokens.
    """
    largest = max(tokenizer.tokenizer.get_vocab().values())  # includes added tokens
    if largest >= model_vocabulary_size:
        expected = f"token ids below {model_vocabulary_size}, the model's vocabulary size"
        message, found = "the tokenizer knows tokens that the model does not have", f"token ids up to {largest}"
        fix = "use the tokenizer of this model, or resize the model's embeddings"
        raise refusal(message, expected, found, fix, "data.vocabulary")
