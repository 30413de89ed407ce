"""The host of agent loops in an agent worker: what they share, what each gets, and the clean-up after each."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

import attrs

from jackfield.abc.agent import (
    AgentContext,
    AgentLoopBase,
    AgentLoopOutput,
    AgentSequence,
    AgentWorkerContext,
    Relation,
)
from jackfield.abc.rollout import GenerateChunk, GenerateRequest, GenerateResult, SamplingParams
from jackfield.config.agent_service import AgentServiceConfig
from jackfield.data.encoding import tokenizer_of
from jackfield.data.formats import Task
from jackfield.errors import AgentError, JackfieldError, described
from jackfield.runtime.routes import Routes
from jackfield.runtime.tags import not_finite

_WORD = re.compile(r"[a-z_]*")
_FINISH_SECONDS = 10.0  #: for a loop to end what it has opened
_LATELY, _ENOUGH = 256, 16  #: rollouts by which the usual duration is known, at most and at least

Generator = Callable[..., Awaitable[GenerateResult]]  #: of a request, and of what hears its tokens as they come


async def no_model(request: GenerateRequest) -> GenerateResult:
    """Refuse a request in a host without replicas."""
    raise AgentError("no replica generates here", code="agent.context", found=request.request_id)


@attrs.define(eq=False)
class Rollout:
    """What is noted of one rollout while it runs."""

    task: Task
    clock: Any
    began: float = 0.0
    until: float = math.inf  #: the deadline
    asked: list[SamplingParams] = attrs.field(factory=list)  #: sampling parameters of each request
    tokens: int = 0  #: tokens that the model has generated
    metrics: dict[str, float] = attrs.field(factory=dict)  #: sums by name
    events: list[dict[str, Any]] = attrs.field(factory=list)  #: each with its name and its second
    routes: Routes = attrs.field(factory=Routes)  #: experts of the answers
    scratch: Path | None = None
    base: Path | None = None  #: where the scratch folder is made

    def begin(self, seconds: float) -> None:
        """Forget an earlier try, except how many there were; all tries together have so many seconds."""
        self.began, self.tokens = self.clock.time(), 0
        self.until = min(self.until, self.began + seconds)
        self.metrics = {name: number for name, number in self.metrics.items() if name == "retries"}
        self.asked.clear()
        self.events.clear()
        self.routes.clear()

    def metric(self, name: str, number: float) -> None:
        """Add a number to a metric."""
        self.metrics[name] = self.metrics.get(name, 0.0) + number

    def event(self, name: str, **fields: Any) -> None:
        """Note that something happened now."""
        self.events.append({"name": name, "at": round(self.clock.time() - self.began, 6), **fields})

    def folder(self) -> Path:
        """Return the scratch folder, which is made at the first call."""
        if self.scratch is None:
            self.scratch = Path(tempfile.mkdtemp(prefix="rollout-", dir=self.base))
        return self.scratch


@attrs.define(kw_only=True, eq=False)
class AgentHost:
    """Runs the agent loops of one worker."""

    make: Callable[[AgentContext], AgentLoopBase]
    #: returns what generates for one rollout; its argument is called with each request's sampling parameters
    generator: Callable[[Callable[[SamplingParams], None]], Generator] = lambda asks: no_model
    streams: bool = False  #: whether that function takes what hears tokens as they come
    #: what the contexts of all rollouts have in common
    context: AgentContext = attrs.field(factory=lambda: AgentContext(generate=no_model, tokenizer=cast(Any, None)))
    settings: AgentServiceConfig = attrs.field(factory=AgentServiceConfig)
    #: class and settings of the loop, if it has a life in the worker (since ABI 1.1)
    life: tuple[type[AgentLoopBase], Any] | None = None
    worker: AgentWorkerContext | None = None  #: the context of that life
    toolbox: Any = None  #: a ``jackfield_tools.Toolbox``: the run's tools
    _shared: Any = attrs.field(default=None, init=False)
    _started: bool = attrs.field(default=False, init=False)
    _turns: Any = attrs.field(init=False)  #: a semaphore, or a context that waits for nothing
    _lately: deque[float] = attrs.field(factory=lambda: deque(maxlen=_LATELY), init=False)  #: durations in seconds
    _cleaning: set[asyncio.Task[None]] = attrs.field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        most = self.settings.concurrency
        self._turns = nullcontext() if most is None else asyncio.Semaphore(most)

    async def start(self) -> None:
        """Start the run's tools, and what the loops share."""
        if self.toolbox is not None:
            await self.toolbox.start()
        if self.life is not None:
            assert self.worker is not None
            cls, settings = self.life
            self._shared = await cls.start(settings, self.worker)
        self._started = True

    async def close(self) -> None:
        """End what :meth:`start` has opened, also after it failed."""
        if self._cleaning:
            await asyncio.wait(self._cleaning, timeout=_FINISH_SECONDS)
        try:
            if self.life is not None and self._started:
                await self.life[0].close(self._shared)
        finally:
            self._started = False
            if self.toolbox is not None:
                await self.toolbox.close()
            if self.worker is not None:
                await asyncio.to_thread(shutil.rmtree, self.worker.folder, ignore_errors=True)
                with suppress(OSError):  # another worker has its own there
                    self.worker.folder.parent.rmdir()

    def rollout(self, task: Task) -> Rollout:
        """Return the notes of a rollout that begins later."""
        base = None if self.worker is None else self.worker.folder
        return Rollout(task, self.context.clock, base=base)

    async def run(self, notes: Rollout, sampling: Mapping[str, Any], seconds: float) -> AgentLoopOutput:
        """Run a loop on a task, when it is its turn, for at most so many seconds, and clean up after it.

        What the loop raises becomes ``agent.failed``, unless it is an error of ours; what :meth:`AgentLoopBase.finish`
        raises is logged.
        """
        async with self._turns:
            notes.begin(seconds)
            left, usual = notes.until - notes.began, self._usual()
            limit = min(left, usual)
            try:
                running = self._run(notes, sampling, limit)
                if usual >= left and self.settings.concurrency is None:  # the caller's own deadline is the same
                    return await running
                who = f"the agent loop on task {notes.task.id}"
                who += f", {self.settings.times_usual:g} times as long as usual" if usual < left else ""
                return await self.context.clock.wait_for(running, limit, who)
            finally:
                if self.settings.times_usual is not None:
                    self._lately.append(self.context.clock.time() - notes.began)

    async def _run(self, notes: Rollout, sampling: Mapping[str, Any], seconds: float) -> AgentLoopOutput:
        fields, session, agent = notes.task.agent_fields(), None, None
        generate = partial(self._generate, notes, self.generator(notes.asked.append))
        context = attrs.evolve(
            self.context,
            tokenizer=tokenizer_of(self.context.tokenizer, notes.task),
            generate=generate,
            stream=generate if self.streams else None,
            shared=self._shared,
            seed=int(sampling.get("seed") or 0),
            deadline=notes.began + seconds,
            folder=notes.folder,
            metric=notes.metric,
            event=notes.event,
        )
        try:
            if self.toolbox is not None:
                session = self.toolbox.session(context, fields)
                context = attrs.evolve(context, tools=session)
            agent = self.make(context)
            return await agent.run(sampling, **fields)
        except JackfieldError:
            raise
        except BaseException as error:  # SystemExit is the agent's, too
            own = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and own is not None and own.cancelling():
                raise
            message = f"{described(error)} (raised by the agent loop)"
            raise AgentError(message, where=f"task {notes.task.id}") from error
        finally:
            lives = self.life is not None and agent is not None and type(agent).finish is not AgentLoopBase.finish
            ends = [agent.finish] if lives and agent is not None else []
            ends += [] if session is None else [session.close]
            if ends or notes.scratch is not None:
                await self._clean(notes, ends)

    async def _clean(self, notes: Rollout, ends: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """End what a rollout has opened; a cancellation does not interrupt it."""

        async def clean() -> None:
            for end in ends:
                what = f"an agent loop to clean up after task {notes.task.id}"
                try:
                    await self.context.clock.wait_for(end(), _FINISH_SECONDS, what)
                except Exception as error:
                    logging.getLogger("jackfield").warning("%s: %s", what, described(error))
            if notes.scratch is not None:
                await asyncio.to_thread(shutil.rmtree, notes.scratch, ignore_errors=True)

        self._cleaning.add(task := asyncio.create_task(clean()))
        task.add_done_callback(self._cleaning.discard)
        await asyncio.shield(task)

    async def _generate(
        self, notes: Rollout, generate: Generator, request: GenerateRequest, *hear: Callable[[GenerateChunk], None]
    ) -> GenerateResult:
        """Have a request answered under the deadline of a turn, and note it."""
        clock, seconds = self.context.clock, self.settings.turn_seconds
        since = clock.time()
        if seconds is None:
            result = await generate(request, *hear)
        else:
            who = f"answer {len(notes.asked) + 1} of the model on task {notes.task.id}"
            result = await clock.wait_for(generate(request, *hear), seconds, who)
        notes.tokens += len(result.token_ids)
        notes.routes.note(request, result)
        took = {"seconds": round(clock.time() - since, 6), "tokens": len(result.token_ids)}
        version = max(result.weight_versions, default=None)
        notes.event("generate", **took, finish_reason=result.finish_reason, weight_version=version)
        return result

    def _usual(self) -> float:
        """Return the longest duration that a rollout may have by those that ended lately, in seconds."""
        times = self.settings.times_usual
        if times is None or len(self._lately) < _ENOUGH:
            return float("inf")
        ordered = sorted(self._lately)
        return times * ordered[int(0.9 * (len(ordered) - 1))]


def checked_output(
    output: AgentLoopOutput, notes: Rollout, vocabulary: int | None, arrays: bool
) -> list[AgentSequence]:
    """Return the sequences, or raise ``agent.output`` or, for values of other types, any exception."""

    def refuse(what: str, expected: str, found: str, fix: str | None = None) -> NoReturn:
        message, where = f"an agent loop returned {what}", f"task {notes.task.id}"
        raise AgentError(message, code="agent.output", where=where, expected=expected, found=found, fix=fix)

    turns, wrong = output.num_turns, not_finite({**notes.metrics, **output.metrics})
    if wrong or not isinstance(turns, int) or turns < 1:
        expected = "num_turns of 1 or more, and finite numbers as metrics"
        refuse("metrics that are not numbers", expected, f"num_turns {turns!r}, metrics {wrong}")
    if not isinstance(output.end_reason, str) or not _WORD.fullmatch(output.end_reason):
        refuse(
            "an end reason that is not a word", "lower-case letters and _, such as answered", repr(output.end_reason)
        )
    for number, each in enumerate(sequences := list(output.sequences)):
        if each.multi_modal_inputs and not arrays:
            found = f"multi_modal_inputs {', '.join(sorted(map(str, each.multi_modal_inputs)))}"
            fix = "declare the agent's capability multi_modal, or leave them empty"
            refuse("multi_modal_inputs, and does not declare them", "tokens alone", found, fix)
        parts = (each.response_ids, each.response_mask, each.response_log_probs, each.weight_versions)
        lengths = list(map(len, parts))
        if lengths.count(lengths[0]) != 4 or not each.prompt_ids or not each.response_ids:
            names = ("response_ids", "response_mask", "response_log_probs", "weight_versions")
            expected = "a prompt, and a response whose ids, mask, log-probs and versions have one length above 0"
            found = f"prompt {len(each.prompt_ids)}, {dict(zip(names, lengths, strict=True))}"
            refuse("a sequence whose parts do not fit", expected, found)
        ids, reward = (*each.prompt_ids, *each.response_ids), 0.0 if each.reward is None else each.reward
        if min(ids) < 0 or max(ids) >= (vocabulary or math.inf):
            raise ValueError(f"token ids from {min(ids)} to {max(ids)}, and the model has {vocabulary}")
        odd = not_finite({"reward": reward, "step_id": each.step_id}) or {*each.response_mask} - {0, 1}
        if odd or not isinstance(each.finish_reason, str) or not isinstance(each.name, str):
            raise ValueError(f"{odd} in reward, step_id or response_mask, finish_reason {each.finish_reason!r}")
        if each.parent is None and each.relation is None:
            continue
        if each.relation not in get_args(Relation) or each.parent not in range(number):
            expected = f"the index of an earlier sequence, and one of {', '.join(get_args(Relation))}; or neither"
            refuse("a sequence with a wrong parent", expected, f"parent {each.parent}, relation {each.relation!r}")
    return sequences
