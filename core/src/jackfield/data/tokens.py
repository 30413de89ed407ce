"""A chat tokenizer over a Hugging Face tokenizer that tokenizes each text once.

History is never rendered again. The text that a template inserts between the model's answer and its next turn is
computed by rendering a dummy conversation, so that each inserted token is known and the sequence only grows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jackfield.abc.agent import ChatTokenizer
from jackfield.data.tasks import Task, naming, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Messages: TypeAlias = Sequence[Mapping[str, Any]]
_QUESTION: Mapping[str, Any] = {"role": "user", "content": "q"}
_ANSWER = "jackfield-answer"
_CACHED_CHATS = 4096
_APPENDING = "give a chat_template that renders every message without looking at later ones"


class HuggingFaceChatTokenizer:
    """A :class:`jackfield.abc.agent.ChatTokenizer` over a tokenizer of the transformers library.

    ``chat_template`` is a Jinja template that replaces the tokenizer's own; without either, ``data.no-chat-template``
    is raised, and ``data.malformed`` if it cannot render a plain question. ``end_token_ids`` are end tokens in addition
    to the tokenizer's and the template's; without any, ``data.no-end-token`` is raised.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None, end_token_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        own = tokenizer.chat_template
        self._template = chat_template or (own.get("default") if isinstance(own, dict) else own)
        name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        self._refusal = functools.partial(refusal, where=f"the tokenizer {name}")
        if not self._template:
            expected = "a chat template in the tokenizer's folder (chat_template.jinja), or in the configuration"
            fix = "set data.chat_template to a Jinja template, or use an instruction-tuned model"
            raise self._refusal("the tokenizer has no chat template", expected, "neither", fix, "data.no-chat-template")
        # a base model's tokenizer often has another end token than its chat template uses (<|im_end|>)
        text = self._render([_QUESTION, {"role": "assistant", "content": _ANSWER}], generation_prompt=False)
        after = self._encode(text.partition(_ANSWER)[2])[:1]
        special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        self._turn_end = next((token for token in after if token in special), None)
        found = (self._turn_end, tokenizer.eos_token_id, *end_token_ids)
        #: the token ids that end a turn of the model; :meth:`encode_response` adds the first one
        self.end_token_ids: tuple[int, ...] = tuple(dict.fromkeys(token for token in found if token is not None))
        if not self.end_token_ids:
            expected = "an end-of-text token of the tokenizer, or a special token after an answer in the template"
            fix = "set the tokenizer's eos_token"
            raise self._refusal("no token ends the model's answer", expected, "neither", fix, "data.no-end-token")
        self._encode_chat = functools.lru_cache(_CACHED_CHATS)(
            lambda messages: self._encode(self._render(json.loads(messages), generation_prompt=True))
        )

    @classmethod
    def load(
        cls, name: str | Path, *, chat_template: str | None = None, trust_remote_code: bool = False
    ) -> HuggingFaceChatTokenizer:
        """Load the tokenizer of a model folder (or of a model on the Hub), or raise ``data.missing``.

        The end tokens of the folder's generation config are also used.
        """
        from transformers import AutoTokenizer

        local = Path(name).is_dir()
        try:
            options: Any = {"local_files_only": local, "trust_remote_code": trust_remote_code}
            tokenizer = AutoTokenizer.from_pretrained(str(name), **options)
        except (OSError, ValueError) as error:
            expected = "a folder made by save_pretrained, or a name on the Hugging Face Hub"
            found = str(error).splitlines()[0] if str(error) else type(error).__name__
            message, fix = "the tokenizer cannot be loaded", "check the path; save the tokenizer beside the model"
            raise refusal(message, expected, found, fix, "data.missing", str(name)) from error
        file = Path(name) / "generation_config.json"
        ends = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        end_token_ids = (ends or ()) if isinstance(ends, list | None) else (int(ends),)
        return cls(tokenizer, chat_template=chat_template, end_token_ids=end_token_ids)

    def encode_chat(self, messages: _Messages) -> tuple[int, ...]:
        """Return the tokens of a conversation up to the model's answer, from a cache if possible.

        Messages that the template refuses raise ``data.malformed``.
        """
        return self._encode_chat(json.dumps(list(messages), default=dict))

    def encode_turn(self, messages: _Messages) -> tuple[int, ...]:
        """Return the tokens that append messages to the model's answer, up to its next answer.

        The answer must end with one of :attr:`end_token_ids`; that token is not repeated. Thinking that a template
        would remove from earlier answers is kept, since the model saw it. A template that would change earlier turns
        is refused (``data.not-append-only``).
        """
        before = self._render([_QUESTION], generation_prompt=False)
        after = self._render([_QUESTION, {"role": "assistant", "content": _ANSWER}, *messages], generation_prompt=True)
        if not after.startswith(before) or _ANSWER not in after[len(before) :]:
            message = "the chat template changes earlier turns when further messages follow"
            expected = f"{before!r}, an answer, then the further messages"
            raise self._refusal(message, expected, repr(after), _APPENDING, "data.not-append-only")
        token_ids = self._encode(after[len(before) :].partition(_ANSWER)[2])
        return token_ids[1:] if token_ids[:1] and token_ids[0] in self.end_token_ids else token_ids

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a target answer of supervised training, including the end token."""
        return (*self._encode(text), self.end_token_ids[0])

    def encode_completion(self, messages: _Messages, completion: _Messages) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens of target messages, as the template renders them after the prompt, and their mask.

        The mask is 1 on the assistant's text, including the token that ends its turn, and 0 on tool results, turn
        headers and text that the template puts after the last turn. ``messages`` is the prompt; the last message of
        ``completion`` is the assistant's.
        Errors are ``data.not-append-only`` if the tokens of the prompt, or of the turns before an answer, are not a
        prefix of the whole, and ``data.malformed`` if the template refuses the messages or omits one.
        """
        text = self._render([*messages, *completion], generation_prompt=False)
        whole = self._encode(text)
        mask = [0] * len(whole)
        for number, message in enumerate(completion):
            if message["role"] != "assistant":
                continue
            content = message.get("content")
            if isinstance(content, str) and "".join(content.split()) not in "".join(text.split()):
                problem = "the chat template leaves out a part of an answer"  # thinking, or a role it does not know
                fix = "give another chat_template, or take that part out of the data"
                raise self._refusal(problem, f"the answer {content[:200]!r}", repr(text[-400:]), fix)
            start = self._prefix([*messages, *completion[:number]], whole, generation_prompt=True)
            if self._turn_end is None:
                end = self._prefix([*messages, *completion[: number + 1]], whole, generation_prompt=False)
            else:
                ends = (place for place in range(start, len(whole)) if whole[place] in self.end_token_ids)
                end = next(ends, len(whole) - 1) + 1
            mask[start:end] = [1] * (end - start)
        prompt = len(self.encode_chat(messages))
        if self._turn_end is None:
            return (*whole[prompt:], self.end_token_ids[0]), (*mask[prompt:], 1)
        return whole[prompt:], tuple(mask[prompt:])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _render(self, messages: _Messages, generation_prompt: bool) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # errors of Jinja and of the template
            found = f"{type(error).__name__}: {error}; roles {[message.get('role') for message in messages]}"
            fix = "check the roles and their order, or give another chat_template"
            raise self._refusal("the chat template refuses the messages", None, found, fix) from error
        return text

    def _prefix(self, messages: _Messages, whole: tuple[int, ...], *, generation_prompt: bool) -> int:
        """Return the number of tokens that render these messages, which must be a prefix of ``whole``."""
        begin = self._encode(self._render(messages, generation_prompt))
        if whole[: len(begin)] != begin:
            same = next((n for n, (one, two) in enumerate(zip(begin, whole, strict=False)) if one != two), len(whole))
            expected, found = (repr(self.decode(each[same : same + 8], False)) for each in (begin, whole))
            message = "the tokens of a prompt are not the first tokens of the prompt with its answer"
            fix = f"{_APPENDING}, and whose generation prompt begins an answer as it stands in the conversation"
            raise self._refusal(message, f"token {same} to be {expected}", found, fix, "data.not-append-only")
        return len(begin)


def encode_prompt(tokenizer: ChatTokenizer, task: Task, max_tokens: int | None) -> tuple[int, ...]:
    """Encode a task's prompt of at most ``max_tokens`` tokens (None: any number), else ``data.prompt-too-long``."""
    with naming(task.place or f"task {task.id}"):
        token_ids = tuple(task.tokens[0]) if task.tokens is not None else tokenizer.encode_chat(task.messages)
        if max_tokens is not None and len(token_ids) > max_tokens:
            expected, found = f"at most {max_tokens} tokens", f"{len(token_ids)} tokens"
            fix = "leave this task out of the data, or raise data.max_prompt_tokens or cluster.max_model_len"
            raise refusal("a prompt has too many tokens", expected, found, fix, "data.prompt-too-long")
    return token_ids


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
                encoded.append(tokenizer.encode_completion(task.messages, answer))
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
