"""Experiences of whole groups in the reward worker: what operators see, change and make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, TypeAlias

import attrs

from jackfield.abc.agent import AgentSequence
from jackfield.abc.reward import ScoreRequest, ScoreResult
from jackfield.data.encoding import encode_answers, encode_prompt
from jackfield.data.formats import Task
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.queue import Values
from jackfield.queue.meta import Written
from jackfield.queue.sample_files import cell_of
from jackfield.runtime.samples import sequence_cells, sequence_tags
from jackfield.sdk.cells import join, rows_of

Scored: TypeAlias = tuple[ScoreRequest, ScoreResult]
MADE = "made"  #: the partition of samples that operators made
_FIELDS = tuple(field.name for field in attrs.fields(ScoreResult))
_LOG_PROBS = frozenset({"log_prob_mean", "log_prob_min"})  #: columns for which the log-probs of tokens are read


@attrs.frozen(kw_only=True)
class MadeSample:
    """A sample that an operator made, whose values the reward worker keeps until :meth:`ExperienceShaper.put`."""

    name: str
    operation: str  #: the operator
    parents: tuple[str, ...]  #: keys of the samples that it was made from


@attrs.define(eq=False, kw_only=True)
class ExperienceShaper:
    """Has the operators of ``data.pipeline.experiences`` see the scored samples of whole groups."""

    pipeline: Any  #: a ``jackfield_pipelines.ExperiencePipeline`` that is started
    values: Values
    tokenizer: HuggingFaceChatTokenizer
    keeps_made: bool  #: whether rows that operators made are samples, too (``mixing.made``)
    arrays: bool = False  #: whether samples have ``multi_modal_inputs``
    _made: dict[str, tuple[dict[str, Any], dict[str, Any]]] = attrs.field(factory=dict, init=False)

    async def shape(
        self, partition: str, scored: Mapping[str, Scored]
    ) -> tuple[dict[str, Scored], dict[str, str], tuple[MadeSample, ...]]:
        """Return scores with the numbers that operators wrote; by key, why a sample is not kept; and samples made.

        Numbers that operators write are metrics, and ``reward`` is the score.
        """
        good = {key: one for key, one in scored.items() if one[1].status == "ok"}
        more = await self._log_probs(partition, list(good)) if _LOG_PROBS & self.pipeline.reads else {}
        batches = dict[int, dict[str, Any]]()
        for key, (asked, result) in good.items():
            record = {**_experience(asked, result), **more.get(key, {})}
            batches.setdefault(asked.priority, {})[key] = record
        shaped, removed, made = dict(scored), dict[str, str](), list[MadeSample]()
        for batch, records in sorted(batches.items()):
            found = await self.pipeline.shape(records, batch)
            for key, written in found.columns.items():
                shaped[key] = scored[key][0], _with_columns(scored[key][1], written)
            removed |= found.removed
            made += await self._kept(partition, found.made, scored) if self.keeps_made else ()
        return shaped, removed, tuple(made)

    async def _log_probs(self, partition: str, keys: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the mean and the minimum of the log-probs of each sample's own tokens."""
        columns = await self.values.get(partition, keys, ("rollout_log_probs", "response_mask"))
        found = dict[str, dict[str, float]]()
        for key, numbers, mask in zip(keys, *map(rows_of, columns.values()), strict=True):
            if own := list(compress(numbers.tolist(), mask.tolist())):
                found[key] = {"log_prob_mean": sum(own) / len(own), "log_prob_min": min(own)}
        return found

    async def _kept(self, partition: str, rows: Sequence[Any], scored: Mapping[str, Scored]) -> list[MadeSample]:
        """Make samples of rows with a response: the prompt is the parent's, unless the row has other messages."""
        made, rows = list[MadeSample](), [row for row in rows if isinstance(row.values.get("response"), str)]
        if not rows:
            return []
        firsts = list(dict.fromkeys(row.parents[0] for row in rows))
        read = (await self.values.get(partition, firsts, ("prompt_ids",)))["prompt_ids"]
        prompts = {key: ids.tolist() for key, ids in zip(firsts, rows_of(read), strict=True)}
        for row in rows:
            own, parent = row.values, scored[row.parents[0]][0]
            messages = tuple(own.get("messages") or parent.messages)
            given: Any = {name: str(own.get(name, getattr(parent, name))) for name in ("ground_truth", "data_source")}
            task = Task(id=row.key, messages=messages, fields=parent.extra_info, **given)
            is_parents = messages == tuple(parent.messages)
            prompt = prompts[row.parents[0]] if is_parents else encode_prompt(self.tokenizer, task, None)
            ((tokens, mask),) = encode_answers(self.tokenizer, attrs.evolve(task, response=own["response"]))
            sequence = AgentSequence(
                prompt_ids=tuple(prompt),
                response_ids=tuple(tokens),
                response_mask=tuple(mask),
                response_log_probs=(0.0,) * len(tokens),
                weight_versions=(),
                reward=float(own.get("reward") or 0.0),
            )
            cells = sequence_cells(task, sequence, {}, {}, supervised=False, versions=False, arrays=self.arrays)
            cells["reward"] = cell_of("reward", [sequence.reward])
            tags = {**sequence_tags(task, sequence, 0), "expert": True}
            self._made[row.key] = cells, tags
            made.append(MadeSample(name=row.key, operation=row.operator, parents=tuple(row.parents)))
        return made

    async def put(self, name: str, key: str) -> Written:
        """Write the values of a sample that was made under its key in the queue."""
        cells, tags = self._made[name]
        columns = {column: join(column, [cell]) for column, cell in cells.items()}
        written = await self.values.put(MADE, [key], columns, [tags])
        del self._made[name]
        return written


def _experience(asked: ScoreRequest, result: ScoreResult) -> dict[str, Any]:
    """Return the columns of a scored sample that operators may read; the task's own fields are among them."""
    own = {"prompt": asked.prompt_str, "response": asked.solution_str, "reward": total(result)}
    own |= {"ground_truth": asked.ground_truth, "data_source": asked.data_source, "group": asked.group_id}
    own |= {"turns": asked.turns, "response_tokens": len(asked.response_ids), "messages": asked.messages}
    return {**asked.extra_info, **result.metrics, **result.dimensions, **own}


def _with_columns(result: ScoreResult, written: Mapping[str, Any]) -> ScoreResult:
    """Return a score with the reward that operators wrote; token scores get the difference at their end."""
    numbers = {name: float(value) for name, value in written.items() if isinstance(value, int | float)}
    reward, before = numbers.pop("reward", total(result)), total(result)
    values = {name: getattr(result, name) for name in _FIELDS}  # several times faster than attrs.evolve
    values["metrics"] = {**result.metrics, **numbers, "unshaped": before}
    if result.token_scores:
        *others, last = result.token_scores
        values["token_scores"] = (*others, last + reward - before)
    else:
        values["score"] = reward
    return ScoreResult(**values)


def total(result: ScoreResult) -> float:
    """Return a score, or the sum of its token scores."""
    return sum(result.token_scores) if result.token_scores else float(result.score or 0.0)
