"""A chat tokenizer over a Hugging Face tokenizer that tokenizes each text once.

History is never rendered again. The text that a template inserts between the model's answer and its next turn is
computed by rendering a dummy conversation, so that each inserted token is known and the sequence only grows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield.data.formats import Task, naming, refusal
from jackfield.errors import DataError, PluginError
from jackfield.sdk._messages import Messages as _Messages
from jackfield.sdk._messages import parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION: Mapping[str, Any] = {"role": "user", "content": "q"}
_ANSWER = "jackfield-answer"
_CACHED_CHATS = 4096
_CACHED_VIEWS = 64  #: kept tokenizers of tasks with their own tools or variables
_APPENDING = "give a chat_template that renders every message without looking at later ones"
_MARK = "\ufdd0"  # put into names of special tokens that are plain text; Unicode has no character there
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")  # templates add it and leave it out as they like
_NOT_TOOLS = frozenset({"system", "developer", "user", "assistant"})


class HuggingFaceChatTokenizer:
    """A :class:`jackfield.abc.agent.ChatTokenizer` over a tokenizer of the transformers library.

    ``chat_template`` is a Jinja template that replaces the tokenizer's own; without either, ``data.no-chat-template``
    is raised, and ``data.malformed`` if it cannot render a plain question. ``end_token_ids`` are end tokens in addition
    to the tokenizer's and the template's; without any, ``data.no-end-token`` is raised.
    """

    tools: _Messages = ()  #: schemas that the template shows where a caller gives none
    template_options: Mapping[str, Any] = {}  #: variables of the template
    image_folders: Sequence[Path] = ()  #: the folders of pictures that are given by their paths: those of the data

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
        added = tokenizer.added_tokens_decoder.items()
        self._special = {number for number, token in added if token.special}
        self._names = _any_of(token.content for _, token in added if token.special)
        self._turn_end = self._token_after_answer()
        ends = [self._turn_end]
        with contextlib.suppress(DataError):  # GPT-OSS has another one when further messages follow
            ends.append(self._token_after_answer(_QUESTION))
        found = (self._turn_end, tokenizer.eos_token_id, *end_token_ids)
        #: the token ids that end a turn of the model; :meth:`encode_response` adds the first one
        self.end_token_ids: tuple[int, ...] = tuple(dict.fromkeys(token for token in found if token is not None))
        if not self.end_token_ids:
            expected = "an end-of-text token of the tokenizer, or a special token after an answer in the template"
            fix = "set the tokenizer's eos_token"
            raise self._refusal("no token ends the model's answer", expected, "neither", fix, "data.no-end-token")
        self._turn_ends = {*self.end_token_ids, *(token for token in ends if token is not None)}
        self._end_names = _any_of(tokenizer.convert_ids_to_tokens(list(self._turn_ends)))
        # a tokenizer of the SentencePiece kind begins each text with a space
        self._adds_space = self.decode(self._encode("x") * 2, False) != "xx"
        self._prepare()

    def _prepare(self) -> None:
        """Make what depends on tools and variables of the template."""
        self._header = self._render([_QUESTION], True).removeprefix(self._render([_QUESTION], False))
        self._encode_chat = functools.lru_cache(_CACHED_CHATS)(
            lambda messages, tools: self._encode(self._render(json.loads(messages), True, json.loads(tools)))
        )
        self._opening = functools.lru_cache(_CACHED_CHATS)(
            lambda asked, tools: self._render([_QUESTION], asked, json.loads(tools))
        )
        self._views = functools.lru_cache(_CACHED_VIEWS)(
            lambda tools, options: self.with_template(json.loads(tools), json.loads(options))
        )

    def with_template(self, tools: _Messages, options: Mapping[str, Any]) -> HuggingFaceChatTokenizer:
        """Return a tokenizer whose template shows these tools and has these variables beside those of this one.

        A variable that is not in the template is ``data.malformed``.
        """
        for name in options:
            if not re.search(rf"\b{re.escape(name)}\b", str(self._template)):
                fix = "correct its name, or leave it out of the template's options"
                raise self._refusal("the chat template does not use a variable", None, repr(name), fix)
        made = copy.copy(self)
        made.tools, made.template_options = tools or self.tools, {**self.template_options, **options}
        made._prepare()
        return made

    def of(self, task: Task) -> HuggingFaceChatTokenizer:
        """Return the tokenizer with a task's own tools and variables of the template."""
        if not (task.tools or task.template_options):
            return self
        with naming(task.place or f"task {task.id}"):
            return self._views(*(json.dumps(each, sort_keys=True) for each in (task.tools, task.template_options)))

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

    def encode_chat(self, messages: _Messages, *, tools: _Messages = ()) -> tuple[int, ...]:
        """Return the tokens of a conversation up to the model's answer, from a cache if possible.

        Messages that the template refuses raise ``data.malformed``.
        """
        return self._encode_chat(json.dumps(list(messages), default=dict), json.dumps(list(tools), default=dict))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text that is put into the model's answer; names of special tokens are plain text."""
        return self._continued(self._plain(text))

    def encode_turn(
        self,
        messages: _Messages,
        *,
        tools: _Messages = (),
        answer: Mapping[str, Any] | None = None,
        closed: bool = True,
    ) -> tuple[int, ...]:
        """Return the tokens that append messages to the model's answer, up to its next answer.

        A ``closed`` answer ends with one of :attr:`end_token_ids`, so the template's end of the turn is left out;
        otherwise it comes first. A template without one (GLM's) begins with the header of the next turn, which the
        model may have written already. ``data.not-append-only`` is raised if the template would render the turns before
        the messages otherwise: if it changes the question, or leaves out or changes the answer's text, reasoning or
        tool calls (whitespace around them, and empty thoughts, do not count), or if the answer's last token would
        merge with what follows. Without ``answer``, this is checked with a short text in its place. In the contents of
        tool results, names of special tokens are plain text.
        """
        said = {"role": "assistant", "content": _ANSWER} if answer is None else answer
        after = self._render([_QUESTION, said, *messages], True, tools)
        schemas = json.dumps(list(tools), default=dict)
        before: str = self._opening(True, schemas).rstrip()
        if not after.startswith(before):
            before = (self._opening(False, schemas) if answer is None else _EMPTY_THOUGHT.sub("", before)).rstrip()
        if not after.startswith(before):
            same = next((at for at, (one, two) in enumerate(zip(before, after, strict=False)) if one != two), 0)
            raise self._changed("changes the turns before the answer", before[same:], after[same:])
        place = self._end_of(said, after, len(before))
        token_ids = self._appended(after[:place], after[place:])
        ends = self._turn_end is not None and token_ids[:1] and token_ids[0] in self._turn_ends
        return token_ids[1:] if closed and ends else token_ids

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

    def encode_multi_modal(
        self, messages: _Messages, *, tools: _Messages = ()
    ) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        """Return the tokens of a conversation, placeholders expanded, and the model's inputs beside tokens by name.

        The processor in the model's folder makes them. Pictures are ``data:`` addresses, or files in
        :attr:`image_folders`. What cannot be read or shown is ``data.image``.
        """
        if not has_parts(messages):
            return self.encode_chat(messages, tools=tools), {}
        return self._seen(self.encode_chat(self._prompts.shown(messages), tools=tools), messages)

    def encode_multi_modal_turn(self, messages: _Messages, **how: Any) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        """Return what :meth:`encode_turn` does, placeholders expanded, and the arrays of the messages' pictures."""
        if not has_parts(messages):
            return self.encode_turn(messages, **how), {}
        return self._seen(self.encode_turn(self._prompts.shown(messages), **how), messages)

    def placeholders(self) -> tuple[int, ...]:
        """Return the token in whose places the model sees pictures."""
        return (int(self.tokenizer.convert_tokens_to_ids(self._prompts.image_token)),)

    def _seen(self, token_ids: tuple[int, ...], messages: _Messages) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        return self._prompts.expanded(token_ids, self.placeholders()[0], messages)  # type: ignore[no-any-return]

    @functools.cached_property
    def _prompts(self) -> Any:
        try:
            library = import_module("jackfield_huggingface.prompts")
        except ModuleNotFoundError as error:
            fix = "pip install 'jackfield-huggingface[images]'"
            raise PluginError("images need jackfield-huggingface", code="plugin.requirement", fix=fix) from error
        return library.ImagePrompts(self.tokenizer.name_or_path, self.image_folders)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _encode(self, text: str) -> tuple[int, ...]:
        if not text.isascii():
            text = text.encode(errors="replace").decode()  # half surrogates, which tools may return
        first, *others = text.split(_MARK)
        token_ids = self.tokenizer.encode(first, add_special_tokens=False)
        return (*token_ids, *(token for other in others for token in self._continued(other)))

    def _continued(self, text: str) -> tuple[int, ...]:
        """Return the tokens of text that continues other text."""
        for start in ("\n", "x", ".") if self._adds_space else ():
            before, both = self._encode(start), self._encode(start + text)
            if both[: len(before)] == before:
                return both[len(before) :]
        return self._encode(text)

    def _plain(self, text: str) -> str:
        """Return the text with a mark in each name of a special token, so that it is encoded as plain text."""
        return self._names.sub(lambda found: found[0][0] + _MARK + found[0][1:], text.replace(_MARK, "\ufffd"))

    def _token_after_answer(self, *messages: Mapping[str, Any]) -> int | None:
        """Return the special token that the template puts after an answer, if any."""
        text = self._render([_QUESTION, {"role": "assistant", "content": _ANSWER}, *messages], generation_prompt=False)
        token = next(iter(self._encode(text.partition(_ANSWER)[2])), None)
        return token if token in self._special and token != self.tokenizer.unk_token_id else None

    def _end_of(self, answer: Mapping[str, Any], after: str, place: int) -> int:
        """Return where the answer's text ends in a rendered conversation, in which it begins at ``place``."""
        for part in parts(answer):
            found = after.find(part, place)
            between = after[place : max(place, found)]
            if (end := self._end_names.search(after, place)) is None:  # a template without ends: only space is between
                found = -1 if re.sub(r"</?think>|\s", "", between) else found
            elif end.end() <= found and not (self._header and after.startswith(self._header, end.end())):
                found = -1  # only a template as GPT-OSS's has several messages in an answer
            if found < 0:
                raise self._changed("leaves out or changes a part of the answer", part, after[place:])
            place = found + len(part)
        end = self._end_names.search(after, place)
        if end is not None and (answer.get("tool_calls") or not after[place : end.start()].strip()):
            return end.start()
        if answer.get("tool_calls"):
            raise self._changed("shows no end of the answer", "an end token after the tool calls", after[place:])
        return place

    def _appended(self, before: str, text: str) -> tuple[int, ...]:
        """Return the tokens of a text after another one; those of the other one must stay what they are."""
        if not text or self._names.match(text):  # a special token never merges
            return self._encode(text)
        one, both = self._encode(before), self._encode(before + text)
        if both[: len(one)] != one:
            raise self._changed("puts text after the answer that merges with its last token", before, text)
        return both[len(one) :]

    def _changed(self, what: str, expected: str, found: str) -> DataError:
        message = f"the chat template {what} when further messages follow"
        shown = repr(expected[-200:]), repr(found[:200].replace(_MARK, ""))
        return self._refusal(message, *shown, _APPENDING, "data.not-append-only")

    def _render(self, messages: _Messages, generation_prompt: bool, tools: _Messages = ()) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                [self._safe(message) for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                tools=[dict(tool) for tool in tools or self.tools] or None,
                **self.template_options,
            )
        except Exception as error:  # errors of Jinja and of the template
            found = f"{type(error).__name__}: {error}; roles {[message.get('role') for message in messages]}"
            fix = "check the roles and their order, or give another chat_template"
            raise self._refusal("the chat template refuses the messages", None, found, fix) from error
        return text

    def _safe(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message; if it is a tool's result, names of special tokens in it are marked as plain text."""
        content = message.get("content")
        if message.get("role") not in _NOT_TOOLS and isinstance(content, list):
            plain = [{**part, "text": self._plain(part["text"])} if "text" in part else part for part in content]
            return {**message, "content": plain}
        if message.get("role") in _NOT_TOOLS or not isinstance(content, str):
            return dict(message)
        return {**message, "content": self._plain(content)}

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


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of the names, the longest first; without names, it never matches."""
    return re.compile("|".join(map(re.escape, sorted(filter(None, names), key=len, reverse=True))) or r"(?!)")


def has_parts(messages: _Messages) -> bool:
    """Return whether a message has a part that is not a text, such as an image."""
    contents = (message.get("content") for message in messages)
    return any(part.get("type") != "text" for content in contents if isinstance(content, list) for part in content)
