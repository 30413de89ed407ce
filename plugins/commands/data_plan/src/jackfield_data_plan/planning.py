"""From words to a plan that is checked and was tried."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.config import RunConfig
from jackfield.errors import ConfigError, DataError
from jackfield.plugins.registry import Registry
from jackfield_data_plan.asked import PLANNER
from jackfield_data_plan.asking import CORRECTIONS, Planner, conversation_of, planned
from jackfield_data_plan.catalogue import Catalogue, catalogue
from jackfield_data_plan.checking import problems_of
from jackfield_data_plan.keywords import drafted
from jackfield_data_plan.parts import as_yaml, plain
from jackfield_data_plan.sources import Source
from jackfield_data_plan.trying import DryRun
from jackfield_data_plan.untrusted import check_allowed
from jackfield_reward_requests import AiohttpClient


@attrs.frozen(kw_only=True)
class ModelOptions:
    """The model that plans, and what it and operators may do."""

    url: str | None = None
    model: str | None = None
    key_variable: str | None = None
    seconds: float = 120.0
    samples: bool = True  #: whether it is shown rows, and errors that may have texts of rows
    allowed: Collection[str] = ()  #: operators, or OPERATOR.SETTING, whose settings may name files and so on
    ask: bool = False  #: whether operators may ask models in a dry run
    trial_seconds: float = 120.0  #: deadline of a dry run

    def __attrs_post_init__(self) -> None:
        """Refuse options that need another one."""
        if (self.url is None) != (self.model is None):
            missing = "--model" if self.model is None else "--model-url"
            raise ConfigError(f"a model that plans needs {missing}", code="config.missing-key", where=missing)
        if self.url is None and (self.key_variable is not None or self.allowed or not self.samples):
            what = "--key-variable, --allow and --no-samples have no effect without a model"
            raise ConfigError(what, expected="--model-url and --model", found="neither")
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            fix, found = (
                f"export {self.key_variable}=…, or leave the option out",
                f"{self.key_variable}, which is not set",
            )
            details: Any = {"where": "--key-variable", "expected": "a variable with the key of the model's address"}
            raise ConfigError("the key of the model that plans is not there", found=found, fix=fix, **details)

    def models(self, config: RunConfig) -> dict[str, Any] | None:
        """Return the models that operators may ask in a dry run; None: none."""
        if not self.ask:
            return None
        found = {name: dict(each) for name, each in config.models.items() if "url" in each}
        if self.url is not None:
            found[PLANNER] = {"url": self.url, "model": self.model, "key": self.key_variable}
        return found

    def dry_run(self, source: Source) -> DryRun:
        """Return what tries operators on the rows of a source."""
        models = self.models(source.config)
        keys = [str(each["key"]) for each in (models or {}).values() if each.get("key")]
        withheld = [self.key_variable] if self.key_variable and self.key_variable not in keys else []
        limits: Any = {"seconds": self.trial_seconds, "trusted": self.url is None}
        return DryRun(source=source, ask=models, secrets=keys, withheld=withheld, **limits)


@attrs.frozen(kw_only=True)
class Plan:
    """Operators that are valid, how they came about, and what the dry run found."""

    planner: str  #: "keywords", or the name of the model
    tasks: Sequence[Mapping[str, Any]]
    trial: Mapping[str, Any]
    explanation: str = ""  #: the model's
    answers: int = 0  #: of the model
    used: Mapping[str, str] = attrs.field(factory=dict)  #: words that keywords were found in, with the operator
    not_understood: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def yaml(self) -> str:
        """The section of a run's file."""
        return as_yaml([dict(task) for task in self.tasks])

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields."""
        return {**attrs.asdict(self), "yaml": self.yaml}


@attrs.define(kw_only=True)
class Planning:
    """Makes plans for some words and rows; with a model, one conversation goes on from plan to plan."""

    words: str
    source: Source
    registry: Registry
    options: ModelOptions
    known: Catalogue = attrs.field(init=False)
    _conversation: list[dict[str, str]] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        """Look at the operators; without any, ``data.plan`` is raised."""
        self.known = catalogue(self.registry, self.source.names)
        if not self.known.operators:
            fix = "pip install jackfield-operator-basic"
            found = "; ".join(self.known.left_out) or "none"
            raise DataError("no operator can be used", code="data.plan", expected="operators", found=found, fix=fix)
        check_allowed(self.options.allowed, self.registry)

    def plan(self, corrections: int = CORRECTIONS) -> Plan:
        """Return a plan that is valid and was tried; raise ``data.plan`` if there is none."""
        if self.options.url is None:
            return self._drafted()
        records = self.source.records if self.options.samples else ()
        self._conversation = conversation_of(self.words, self.known, self.source.columns, self.source.names, records)
        return self._asked(corrections)

    def again(self, request: str, corrections: int = CORRECTIONS) -> Plan:
        """Have the model answer once more, after what came of its last plan."""
        self._conversation.append({"role": "user", "content": request})
        return self._asked(corrections)

    def _drafted(self) -> Plan:
        draft = drafted(self.words, self.known, self.source, self.registry)
        problems = problems_of(draft.tasks, self.registry, trusted=True)
        trial = {} if problems else self.options.dry_run(self.source)(draft.tasks)
        if problems := [*problems, *trial.get("problems", ())]:
            fix = "say it in other words, or ask a model with --model-url"
            details: Any = {"expected": "operators that are valid", "found": "; ".join(problems), "fix": fix}
            raise DataError("the draft by keywords is not valid, and nothing was run", code="data.plan", **details)
        notes = [*draft.notes, *self.known.left_out]
        shared: Any = {"used": draft.used, "not_understood": draft.not_understood, "notes": notes}
        return Plan(planner="keywords", tasks=draft.tasks, trial=trial, **shared)

    def _asked(self, corrections: int) -> Plan:
        options = self.options
        dry_run = options.dry_run(self.source)

        def verify(tasks: Sequence[Any]) -> tuple[Sequence[str], Mapping[str, Any]]:
            if found := problems_of(tasks, self.registry, allowed=options.allowed):
                return found, {}
            trial = dry_run(tasks)
            return [*trial["problems"], *_failures(trial, options.samples)], trial

        async def ask() -> Any:
            """Ask the model, until its answer is valid."""
            http = AiohttpClient()
            planner = Planner(
                url=str(options.url),
                model=str(options.model),
                http=http,
                clock=Clock(),
                key_variable=options.key_variable,
                seconds=options.seconds,
            )
            try:
                return await planned(self._conversation, planner, self.known, verify, corrections)
            finally:
                await http.close()

        found = asyncio.run(ask())
        shared: Any = {"explanation": found.explanation, "answers": found.answers, "notes": self.known.left_out}
        return Plan(planner=str(options.model), tasks=found.tasks, trial=found.trial, **shared)


def _failures(trial: Mapping[str, Any], detailed: bool) -> list[str]:
    """Return why operators failed in a dry run; without details, no text of a row is in them."""
    failed = [each for each in trial["stages"] if "error" in each]
    told = "the operator {} failed in the dry run: {}"
    return [
        told.format(each["operator"], plain(each["error"]["message" if detailed else "code"], 400)) for each in failed
    ]
