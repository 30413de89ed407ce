"""Samplers: which of the groups that are ready a consumer gets.

What a sampler draws depends on its settings, its seed and how often it has been asked; the queue's checkpoint keeps the
last, so that a run that goes on draws what it would have drawn.
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
    """What a sampler sees: the groups that one consumer could have now, in the order of batch and index."""

    _groups: Mapping[str, Any]  # the queue's own records, by name
    _consumer: str
    step: int | None = None  #: of the trainer that asks; None: unknown

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the groups."""
        return iter(self._groups)

    def tags(self, name: str) -> Mapping[str, Any]:
        """Return the tags of a group's first sample, with the oldest and newest weight version of all its samples."""
        tags = [self._groups[name].tags_of(key) for key in self._groups[name].samples]
        bounds = {}
        for bound, choose in (("weight_version_min", min), ("weight_version_max", max)):
            if versions := [each[bound] for each in tags if bound in each]:
                bounds[bound] = choose(versions)
        return {**tags[0], **bounds}

    def uses(self, name: str) -> int:
        """Return how often the consumer has used a group."""
        use = self._groups[name].uses.get(self._consumer)
        return 0 if use is None else len(use.steps)


class Sampler(ABC):
    """Chooses groups for a lease. It may choose none: then the consumer waits for more."""

    @abstractmethod
    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        """Return distinct names out of ``ready``, best first, ``count`` at most (None: any number)."""

    def state_dict(self) -> dict[str, Any]:
        """Return what has to be known to go on, as plain JSON values."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""
        return


@attrs.define(kw_only=True)
class Sequential(Sampler):
    """First ready, first served."""

    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        """Return the first ``count``."""
        return list(islice(ready, count))


@attrs.define(kw_only=True)
class _Drawing(Sampler):
    """Draws at random: each call has a generator of its own, made from the seed and the number of the call."""

    seed: int = option(0, help="of what is drawn")
    _calls: int = attrs.field(default=0, init=False)

    def _generator(self) -> random.Random:
        self._calls += 1
        return random.Random(f"{self.seed}/{self._calls}")

    def state_dict(self) -> dict[str, Any]:
        """Return how often it was asked."""
        return {"calls": self._calls}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._calls = int(saved["calls"])


@attrs.define(kw_only=True)
class Random(_Drawing):
    """Any of them, each with the same probability, none twice in one call."""

    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        """Return ``count`` of them in random order, which does not depend on the order of ``ready``."""
        names = sorted(ready)
        return self._generator().sample(names, len(names) if count is None else min(count, len(names)))


@attrs.define(kw_only=True)
class Priority(_Drawing):
    """Highest priority first: a tag, less a decay for each use; ties go to the one that is ready first."""

    tag: str = option(
        "weight_version_min", help="the number that counts: of the oldest weights that made a token, or a tag of yours"
    )
    decay: float = option(2.0, help="taken off for each use before", validator=ge(0.0))
    sigma: float = option(0.0, help="standard deviation of Gaussian noise on each priority", validator=ge(0.0))

    def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
        """Return the ``count`` with the highest priorities, highest first; without the tag, the number is 0."""
        noise = self._generator()
        ranked = []
        for place, name in enumerate(ready):
            priority = float(ready.tags(name).get(self.tag, 0.0)) - self.decay * ready.uses(name)
            ranked.append((-(priority + (noise.gauss(0.0, self.sigma) if self.sigma else 0.0)), place, name))
        return [name for _, _, name in heapq.nsmallest(len(ranked) if count is None else count, ranked)]


#: Samplers by the name that configurations use: attrs classes whose fields are their settings, or functions.
SAMPLERS: dict[str, Callable[..., Sampler]] = {"priority": Priority, "random": Random, "sequential": Sequential}


def register_sampler(name: str, make: Callable[..., Sampler]) -> None:
    """Offer a sampler under ``name``.

    Args:
        name: of the sampler, in configurations.
        make: an attrs class, whose fields the options are checked against, or a function of them.

    Raises:
        QueueError: ``queue.invalid`` where the name is taken by another one.
    """
    if SAMPLERS.setdefault(name, make) is not make:
        raise QueueError(f"there is a sampler named {name!r} already", where=name, fix="choose another name")


@attrs.frozen(kw_only=True)
class SamplerSpec:
    """A registered sampler as plain values: a section of the configuration, which travels to other processes."""

    name: str = option("sequential", help="sequential, random, priority, or one that a plugin offers")
    options: Mapping[str, Any] = option(factory=dict, help="the sampler's own settings")

    def make(self, where: str = "") -> Sampler:
        """Make a new one.

        Args:
            where: The path of the options, for messages.

        Raises:
            QueueError: ``queue.invalid`` for an unknown name.
            ConfigError: for options that it does not have.
        """
        if self.name not in SAMPLERS:
            known = f"one of {', '.join(sorted(SAMPLERS))}"
            raise QueueError(f"no sampler is named {self.name!r}", where=where or None, expected=known, found=self.name)
        make = SAMPLERS[self.name]
        if isinstance(make, type) and attrs.has(make):
            return cast(Sampler, structure(make, dict(self.options), where=where))
        return make(**self.options)
