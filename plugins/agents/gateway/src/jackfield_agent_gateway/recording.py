"""What one rollout's requests are recorded as: histories that extend each other merge, others are kept apart."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import xxhash

from jackfield.abc.agent import AgentContext, AgentSequence, Relation, ToolCall
from jackfield.abc.rollout import GenerateChunk
from jackfield.errors import DataError
from jackfield.sdk.sequences import Answer
from jackfield_agent_gateway.asking import Ask
from jackfield_agent_gateway.history import after
from jackfield_agent_gateway.lines import Line, Node, Tokens, joined
from jackfield_agent_gateway.settings import GatewayConfig
from jackfield_agent_gateway.speech import Listener, Piece, Speech
from jackfield_openai.said import Answers, Head, Said
from jackfield_openai.text import ClientError
from jackfield_tool_calls import Format, parse, split_reasoning

_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9  #: some templates want ids of calls to have exactly nine letters and digits


@attrs.define(eq=False)
class _Record:
    """A request and its answers, which may still be under way."""

    lines: list[Line]
    said: dict[int, Said] = attrs.field(factory=dict)  #: by choice; what a retry need not generate again
    task: asyncio.Task[Answers] | None = None
    head: Head = attrs.field(factory=Head)
    speeches: dict[int, Speech] = attrs.field(factory=dict)  #: by choice; what clients have heard of the running task
    pieces: list[Piece] = attrs.field(factory=list)
    listeners: list[Listener] = attrs.field(factory=list)

    def clear(self, _: object = None) -> None:
        """Forget what was heard."""
        self.speeches.clear()
        self.pieces.clear()
        self.listeners.clear()


class Recording:
    """The requests of one rollout. It belongs to one event loop."""

    def __init__(
        self, config: GatewayConfig, context: AgentContext, sampling: Mapping[str, Any], format: Format | None
    ) -> None:
        self._config, self._context, self._sampling, self._format = config, context, dict(sampling), format
        self._records: dict[str, _Record] = {}
        self._nodes: dict[str, Node] = {}
        self._texts: list[Node] = []  #: of completions
        self._roots: dict[str, Line] = {}  #: by what they began with
        self._tasks: dict[str, Line] = {}  #: by what they began with, up to the first message of the user
        self._lines: list[Line] = []
        self._running: set[asyncio.Task[Answers]] = set()
        self.calls: list[ToolCall] = []  #: all that the model has made
        self.turns = 0  #: answers of the model
        self.repeats = 0  #: requests that were answered from the record
        self.is_ended = False
        self.is_full = False  #: a request was refused because no token was left for its answer
        self.is_aborted = False  #: the server has ended an answer: the model is not asked again

    async def answer(self, ask: Ask, listener: Listener | None = None) -> Answers:
        """Return the answers to a request: new ones, or those that an equal request got or is about to get.

        A ``listener`` gets the pieces of those that are under way, if the request that has begun them streams.

        A caller that is cancelled leaves the request running: its repeat finds it. ``ClientError`` is the client's
        mistake; errors of the model's server are raised, and a repeat generates what is missing.
        """
        record = self._records.get(ask.key)
        if self.is_aborted and (record is None or record.task is None or _has_failed(record.task)):
            raise _aborted()
        if record is not None and not ask.is_retry and self._config.repeats == "branch":
            record = None
        if record is None:
            record = self._records[ask.key] = _Record(self._prepared(ask))
        else:
            self.repeats += 1
        if record.task is None or _has_failed(record.task):
            record.clear()
            record.task = asyncio.create_task(self._run(ask, record))
            self._running.add(record.task)
            record.task.add_done_callback(self._note_end)
            record.task.add_done_callback(record.clear)
        if listener is not None:
            listener.head = record.head
            for piece in record.pieces:
                listener.pieces.put_nowait(piece)
            record.listeners.append(listener)
        return await asyncio.shield(record.task)

    def restarted(self) -> Recording:
        """Return an empty recording for another attempt at the same rollout."""
        return Recording(self._config, self._context, self._sampling, self._format)

    async def end(self) -> None:
        """Refuse further requests, and cancel those that run."""
        self.is_ended = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def sequences(self) -> tuple[AgentSequence, ...]:
        """Return what was recorded so far."""
        return joined(self._lines)

    def _note_end(self, task: asyncio.Task[Answers]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # or asyncio would log one whose clients have left

    # -- the model's turn

    async def _run(self, ask: Ask, record: _Record) -> Answers:
        missing = [number for number in range(len(record.lines)) if number not in record.said]
        if len(missing) == 1:
            await self._choice(ask, record, missing[0])
        else:
            async with asyncio.TaskGroup() as tasks:
                for number in missing:
                    tasks.create_task(self._choice(ask, record, number))
        return Answers(said=[record.said[number] for number in range(len(record.lines))], head=record.head)

    async def _choice(self, ask: Ask, record: _Record, number: int) -> None:
        line = record.lines[number]
        line.override = self._config.overrides(ask.sampling)
        if ask.stop_token_ids:
            line.override = {**line.override, "stop_token_ids": self._stops(ask)}
        line.hear = partial(self._hear, ask, record, number) if ask.streams else None
        answer = await line.builder.generate(stop=ask.stop, max_new_tokens=ask.max_tokens)
        if answer.finish_reason == "abort":
            self.is_aborted = True
            raise _aborted()
        said = record.said[number] = self._said(ask, line, answer, record.speeches.get(number))
        self.turns += 1
        self.calls += said.calls
        node = line.arrived()
        if ask.text is not None:
            line.text += answer.text if line.text else ""
            self._texts.append(node)
        else:
            self._nodes.setdefault(after(ask.keys[-1], said.message), node)

    def _stops(self, ask: Ask) -> tuple[int, ...]:
        ends = (*self._sampling.get("stop_token_ids", ()), *ask.stop_token_ids, *self._context.tokenizer.end_token_ids)
        return tuple(dict.fromkeys(ends))

    def _hear(self, ask: Ask, record: _Record, number: int, chunk: GenerateChunk) -> None:
        """Tell listeners what has become certain with the next tokens."""
        if number not in record.speeches:
            decode, prompt = self._context.tokenizer.decode, record.lines[number].prompt_ids
            plain = self._format is None or ask.text is not None
            record.speeches[number] = Speech(number, decode, prompt, ask.stop, self._calls_format(ask), plain)
        piece = record.speeches[number].hear(chunk)
        record.pieces.append(piece)
        for listener in record.listeners:
            listener.pieces.put_nowait(piece)

    def _calls_format(self, ask: Ask) -> Format | None:
        """Return the format of calls in the answers to a request; None: none are looked for."""
        if ask.text is None and ((ask.tools and ask.calls_tools) or self._format == "gpt_oss"):
            return self._format
        return None

    def _said(self, ask: Ask, line: Line, answer: Answer, speech: Speech | None) -> Said:
        assert line.result is not None
        content, reasoning, calls = answer.text, "", list[ToolCall]()
        if self._format is not None and ask.text is None:
            if (format := self._calls_format(ask)) is not None:
                raw = self._context.tokenizer.decode(answer.token_ids, False)
                parsed = parse(raw, format, tools=ask.tools)
                for problem in parsed.problems:
                    self._context.event("bad_tool_call", problem=problem)
                if parsed.calls or not parsed.problems:  # or else the program sees what the model wrote
                    content, reasoning, calls = parsed[:3]
            else:
                reasoning, content = split_reasoning(answer.text)
        if answer.finish_reason == "stop":
            for stop in ask.stop:
                content = content.partition(stop)[0]
        if speech is not None and not speech.fits(content, reasoning):  # it has no form
            content, reasoning = speech.content, speech.reasoning
        return Said(
            content=content,
            reasoning=reasoning,
            calls=tuple(self._named(call, place) for place, call in enumerate(calls)),
            finish_reason=answer.finish_reason,
            prompt_ids=line.prompt_ids,
            token_ids=line.result.token_ids,
            log_probs=line.result.log_probs,
            weight_versions=line.result.weight_versions,
        )

    def _named(self, call: ToolCall, place: int) -> ToolCall:
        """Give a call an id, the same one when the run is repeated."""
        if call.id:
            return call
        number = xxhash.xxh3_64_intdigest(f"{self._sampling.get('seed')}/{len(self.calls) + place}".encode())
        letters = [_ID_LETTERS[number // 36**digit % 36] for digit in range(_ID_LENGTH)]
        return attrs.evolve(call, id="".join(letters))

    # -- the place of a request

    def _prepared(self, ask: Ask) -> list[Line]:
        """Return a line for each choice, which has all messages and waits for the model."""
        try:
            return [self._line(ask) for _ in range(ask.choices)]
        except DataError as error:
            is_long = error.code == "data.prompt-too-long"
            text = f"{error.message}: {error.found}" if error.found else error.message
            raise ClientError(text, "context_length_exceeded" if is_long else "invalid_value", "messages") from error

    def _line(self, ask: Ask) -> Line:
        line = self._text_line(ask) if ask.text is not None else self._chat_line(ask)
        if not line.builder.may_continue:
            raise self._too_long()
        return line

    def _chat_line(self, ask: Ask) -> Line:
        """Return the line that the conversation extends, or a new one."""
        for count in range(len(ask.messages) - 1, 0, -1):
            if (node := self._nodes.get(ask.keys[count - 1])) is not None:
                break
        else:
            return self._root(ask)
        said, rest, line = ask.messages[count - 1], ask.messages[count:], node.line
        if line.at is not node:  # something else follows it already
            line = self._fork(node, ask.messages[: count - 1], ask.tools)
        goes_on = line.builder.append_turn(rest, answer=said)
        line.at = None
        if not goes_on:
            raise self._too_long()
        return line

    def _text_line(self, ask: Ask) -> Line:
        """Return the line whose prompt and answers the text begins with, or a new one."""
        text = ask.text
        assert text is not None
        found: list[tuple[int, Node]] = []
        for node in self._texts:
            if node.line.at is not node or node.answer.closed:  # the text has no end of a turn
                continue
            if isinstance(text, str):
                if node.line.text and text.startswith(node.line.text):
                    found.append((len(node.line.text), node))
            elif text[: node.length] == node.tokens.ids:
                found.append((node.length, node))
        if not found:
            return self._root(ask)
        size, node = max(found, key=lambda each: each[0])
        line, rest = node.line, text[size:]
        line.text, line.at = text if isinstance(text, str) else "", None
        if rest:
            line.tokenizer.given = None if isinstance(rest, str) else rest
            if not line.builder.append_text(rest if isinstance(rest, str) else " "):
                raise self._too_long()
        return line

    def _fork(self, node: Node, messages: list[dict[str, Any]], tools: tuple[Mapping[str, Any], ...]) -> Line:
        line = self._new(Tokens(parent=node.tokens, relation="branch"))
        line.begin(messages, node=node, **self._options(tools))
        self._lines.append(line)
        return line

    def _root(self, ask: Ask) -> Line:
        """Begin a conversation that extends no other one."""
        parent, relation = self._origin(ask)
        line = self._new(Tokens(parent=parent, relation=relation))
        given: Any = None
        messages = ask.messages
        if ask.text is not None:
            is_text = isinstance(ask.text, str)
            given = self._context.tokenizer.encode_text(str(ask.text)) if is_text else ask.text
            line.text = str(ask.text) if is_text else ""
            messages = [{"role": "user", "content": line.text}]
        line.begin(messages, given=given, is_limited=not self._lines, **self._options(ask.tools))
        self._lines.append(line)
        self._roots.setdefault(ask.keys[-1], line)
        self._tasks.setdefault(_task_key(ask), line)
        return line

    def _origin(self, ask: Ask) -> tuple[Tokens | None, Relation | None]:
        """Return from which sequence a new conversation began, and how."""
        if not self._lines:
            return None, None
        if (same := self._roots.get(ask.keys[-1])) is not None:
            return same.history[0], "branch"
        if (same := self._tasks.get(_task_key(ask))) is not None:
            return same.history[-1], "compaction"
        return self._lines[0].history[0], "sub_agent"

    def _new(self, tokens: Tokens) -> Line:
        return Line(self._context, self._sampling, len(self._lines), tokens)

    def _options(self, tools: tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
        config = self._config
        return {
            "tools": tools,
            "on_template_change": config.on_template_change,
            "on_overflow": config.on_overflow,
        }

    def _too_long(self) -> ClientError:
        self.is_full = True
        text = "the conversation leaves no token for an answer: the context or the run's max_new_tokens is used up"
        return ClientError(text, "context_length_exceeded", "messages")


def _task_key(ask: Ask) -> str:
    users = (place for place, message in enumerate(ask.messages) if message["role"] == "user")
    return ask.keys[next(users, -1)]


def _has_failed(task: asyncio.Task[Answers]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _aborted() -> ClientError:
    text = "the model's server has ended an answer before it was complete, and with it this rollout"
    return ClientError(text, "aborted", status=410)
