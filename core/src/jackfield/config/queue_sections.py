"""The sections ``queue`` and ``mixing`` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import attrs
from attrs.validators import and_, ge, gt, le, optional

from jackfield.queue import Reuse
from jackfield.settings import option


@attrs.frozen(kw_only=True)
class SamplerConfig:
    """Which of the groups that may be used are taken."""

    name: str = option("sequential", help="sequential, random, priority, or one that a plugin offers")
    options: Mapping[str, Any] = option(factory=dict, help="the sampler's own settings")


@attrs.frozen(kw_only=True)
class ReplayConfig(Reuse):
    """Groups that were trained on before, once more beside the new ones of each batch."""

    ratio: float = option(help="such groups for each new one, as far as there are any", validator=gt(0.0))
    capacity: int | None = option(
        256, help="used groups that are kept, the sampler's first choices; null: all", validator=optional(gt(0))
    )
    sampler: SamplerConfig = option(
        factory=partial(SamplerConfig, name="priority"), help="which of them are trained on again"
    )


@attrs.frozen(kw_only=True)
class MixConfig(Reuse):
    """Groups of another partition beside the new ones of each batch."""

    ratio: float = option(help="such groups for each new one", validator=gt(0.0))
    samples: str = option(
        help="what is put into the partition before the first step: a .jsonl or .parquet file of samples, or the "
        "folder of a queue (`jackfield queue import`) or run"
    )
    sampler: SamplerConfig = option(factory=SamplerConfig, help="which of them are trained on")


@attrs.frozen(kw_only=True)
class QueueConfig:
    """Where the queue's controller is, how much the queue holds, and what survives a crash."""

    durable: bool = option(
        False,
        help="a run that was killed keeps the rows that it had made since its newest checkpoint; needs a durable "
        "transfer_queue (sql, redis)",
    )
    address: str | None = option(
        None,
        help="the address.json of the controller that the run connects to; null: the controller is part of the run's "
        "process, and with --role the one that is served for the same folder",
    )
    host: str = option("127.0.0.1", help="address at which `jackfield queue serve` listens; beyond loopback with CURVE")
    port: int = option(0, help="port at which it listens; 0: any free port", validator=and_(ge(0), le(65535)))
    rewards: Literal["train", "distributed"] = option(
        "train", help="which process scores samples: the role train, or one of its own (--role reward)"
    )
    max_samples: int | None = option(
        None,
        help="samples in the queue, above which explorers wait; those of the batch that the trainer waits for are let "
        "in, and samples count until the checkpoint after their step; null: no limit",
        validator=optional(gt(0)),
    )
    max_bytes: int | None = option(None, help="the same in bytes of values; null: no limit", validator=optional(gt(0)))


@attrs.frozen(kw_only=True)
class MixingConfig:
    """What a batch has beside the groups of its step."""

    replay: ReplayConfig | None = option(None, help="train again on groups that were trained on before; null: never")
    expert: MixConfig | None = option(
        None, help="samples that an expert wrote, for a loss with an expert (mix, mix_chord); null: none"
    )
    human: MixConfig | None = option(
        None, help="samples with rewards from elsewhere, treated like the policy's own; null: none"
    )
