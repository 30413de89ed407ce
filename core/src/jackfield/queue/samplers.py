"""Samplers, which choose among the ready groups of a consumer.

A sampler's choices depend on its settings, its seed and the number of earlier calls. The queue's checkpoint keeps that
number, so that a resumed run makes the same choices.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import attrs
from attrs.validators import ge

from jackfield.errors import QueueError
from jackfield.settings import option, structure


@attrs.frozen(eq=False)
class Ready:
    """The groups from which a sampler chooses for one consumer, in the order of batch and index."""

    _groups: Mapping[str, Any]  # the queue's own records, by name
    _consumer: str
    step: int | None = None  #: step of the calling trainer; None: unknown

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def tags(self, name: str) -> Mapping[str, Any]:
        """Return the tags of a group's first sample, with the oldest and newest weight version of the group."""
        tags = [self._groups[name].tags_of(key) for key in self._groups[name].samples]
        bounds = {}
        for bound, choose in (("weight_version_min", min), ("weight_version_max", max)):
            if versions := [each[bound] for each in tags if bound in each]:
                bounds[bound] = choose(versions)
        return {**tags[0], **bounds}

    def uses(self, name: str) -> int:
        """Return the number of times that the consumer has used a group."""
        use = self._groups[name].uses.get(self._consumer)
        return 0 if use is None else len(use.steps)


class Sampler(ABC):
    """The base of samplers. If a sampler chooses no group, the consumer waits for more."""

    @abstractmethod
    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        """Return distinct names from ``ready``, best first, at most ``count`` (None: any number)."""

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state as plain JSON values."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the sampler's state."""
        return


@attrs.define(kw_only=True)
class Sequential(Sampler):
    """A sampler that takes groups in the order of batch and index."""

    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        return list(islice(ready, count))


@attrs.define(kw_only=True)
class Random(Sampler):
    """A sampler that draws groups uniformly, without replacement within a call.

    Each call has a generator seeded with the seed and the number of the call.
    """

    seed: int = option(0, help="seed of the random choices")
    _calls: int = attrs.field(default=0, init=False)

    def _generator(self) -> random.Random:
        self._calls += 1
        return random.Random(f"{self.seed}/{self._calls}")

    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        """Return ``count`` groups in a random order that does not depend on the order of ``ready``."""
        names = sorted(ready)
        return self._generator().sample(names, len(names) if count is None else min(count, len(names)))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._calls = int(saved["calls"])


@attrs.define(kw_only=True)
class Priority(Random):
    """A sampler by priority: a tag's value minus a decay per use. Ties keep the order of ``ready``."""

    tag: str = option(
        "weight_version_min", help="tag with the priority: the oldest weight version of a token, or your own tag"
    )
    decay: float = option(2.0, help="subtracted from the priority for each earlier use", validator=ge(0.0))
    sigma: float = option(0.0, help="standard deviation of Gaussian noise on each priority", validator=ge(0.0))

    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        """Return the ``count`` groups of highest priority, highest first. A missing tag counts as 0."""
        noise = self._generator()
        ranked = []
        for place, name in enumerate(ready):
            priority = float(ready.tags(name).get(self.tag, 0.0)) - self.decay * ready.uses(name)
            ranked.append((-(priority + (noise.gauss(0.0, self.sigma) if self.sigma else 0.0)), place, name))
        return [name for _, _, name in heapq.nsmallest(len(ranked) if count is None else count, ranked)]


#: Samplers by the name that configurations use: attrs classes whose fields are their settings, or functions.
SAMPLERS: dict[str, Callable[..., Sampler]] = {"priority": Priority, "random": Random, "sequential": Sequential}


def register_sampler(name: str, make: Callable[..., Sampler]) -> None:
    """Register a sampler under the ``name`` that configurations use.

    ``make`` is an attrs class whose fields are the options, or a function that takes the options.

    Raises:
        QueueError: ``queue.invalid`` if another sampler has the name.
    """
    if SAMPLERS.setdefault(name, make) is not make:
        raise QueueError(f"there is a sampler named {name!r} already", where=name, fix="choose another name")


@attrs.frozen(kw_only=True)
class SamplerSpec:
    """A section of the configuration that chooses a sampler. It can be sent to other processes."""

    name: str = option("sequential", help="sequential, random, priority, or a plugin's sampler")
    options: Mapping[str, Any] = option(factory=dict, help="the sampler's own settings")

    def make(self, where: str = "") -> Sampler:
        """Create a sampler. ``where`` is the path of the options, for error messages.

        Raises:
            QueueError: ``queue.invalid`` for an unknown name.
            ConfigError: If the sampler does not have an option.
        """
        if self.name not in SAMPLERS:
            known = f"one of {', '.join(sorted(SAMPLERS))}"
            raise QueueError(f"no sampler is named {self.name!r}", where=where or None, expected=known, found=self.name)
        make = SAMPLERS[self.name]
        if isinstance(make, type) and attrs.has(make):
            return cast(Sampler, structure(make, dict(self.options), where=where))
        return make(**self.options)
