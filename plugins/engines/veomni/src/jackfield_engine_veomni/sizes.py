"""The parallel sizes of a run, and what they have to divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jackfield.errors import EngineError
from jackfield_engine_veomni.config import Config


def data_parallel_sizes(config: Config, world_size: int) -> tuple[int, int]:
    """Return the data-parallel ranks and those of one copy; refuse sizes that do not divide, with the arithmetic."""
    sequence, expert = config.sequence_parallel, config.expert_parallel
    if world_size % sequence:
        raise _refusal(
            "sequence_parallel",
            f"{world_size} ranks do not make groups of {sequence}",
            f"a divisor of the {world_size} ranks",
            f"{world_size} % {sequence} = {world_size % sequence}",
        )
    data = world_size // sequence
    shard = config.shard_size or data
    if data % shard:
        raise _refusal(
            "shard_size",
            f"{data} data-parallel ranks do not make copies of {shard}",
            f"a divisor of {world_size} ranks / sequence_parallel {sequence} = {data}",
            f"{data} % {shard} = {data % shard}",
        )
    if (shard * sequence) % expert:
        raise _refusal(
            "expert_parallel",
            f"the {shard * sequence} ranks of a copy do not make groups of {expert}",
            f"a divisor of shard_size {shard} * sequence_parallel {sequence} = {shard * sequence}",
            f"{shard * sequence} % {expert} = {(shard * sequence) % expert}",
        )
    return data, shard


def _refusal(name: str, message: str, expected: str, found: str) -> EngineError:
    return EngineError(message, code="config.invalid-value", where=f"engine.{name}", expected=expected, found=found)


def refuse_sizes(config: Mapping[str, Any], settings: Config) -> None:
    """Refuse heads and experts that the parallel sizes do not divide (``config.invalid-value``)."""
    sequence, expert = settings.sequence_parallel, settings.expert_parallel
    heads, values = config["num_attention_heads"], config["num_key_value_heads"]
    wrong = None
    if heads % sequence or (values % sequence and sequence % values):
        wrong = (
            "sequence_parallel",
            sequence,
            f"a divisor of {heads} attention heads that fits {values} key-value heads",
        )
    elif sequence > 1 and "sliding_attention" in (config.get("layer_types") or ()):
        wrong = ("sequence_parallel", sequence, "1 with attention in sliding windows")
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    if expert > 1 and (not experts or experts % expert):
        wrong = ("expert_parallel", expert, f"a divisor of {experts} experts" if experts else "1 with a dense model")
    if wrong is not None:
        name, found, expected = wrong
        message = f"the model does not fit {name}"
        raise EngineError(message, code="config.invalid-value", where=f"engine.{name}", expected=expected, found=found)
