"""How a model of the run is asked: settings, seeds, repeated attempts, counters."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from jackfield.abc.operator import OperatorContext
from jackfield.abc.reward import GeneratedText
from jackfield.clock import Clock
from jackfield.errors import ConfigError, RewardError
from jackfield_model_requests import AskingConfig, Model

pytestmark = pytest.mark.timeout(60)


class Patient(Clock):
    """A clock whose sleeps end at once."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Host:
    """Fails some times, and then answers."""

    def __init__(self, failures: int, code: str = "reward.http") -> None:
        self.failures, self.code, self.calls, self.counts = failures, code, list[dict[str, Any]](), dict[str, float]()

    async def generate(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        self.calls.append({"model": model, **sampling})
        if len(self.calls) <= self.failures:
            raise RewardError("it failed", code=self.code)
        return GeneratedText(text="yes", tokens=7)

    def count(self, name: str, number: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + number

    def model(self, **settings: Any) -> Model:
        context = OperatorContext(clock=Patient(), generate=self.generate, count=self.count, seed=3)
        return Model(AskingConfig(**settings), context)


def ask(model: Model) -> str:
    asking = model.ask([{"role": "user", "content": "well?"}], temperature=0.5, max_tokens=4, seed=model.seed("a"))
    return asyncio.run(asking).text


def test_the_policy_is_asked_again_after_failures_that_may_pass() -> None:
    host = Host(failures=2)
    model = host.model(retries=2)
    assert "yes" == ask(model)
    assert [{"model": "policy", "max_new_tokens": 4, "temperature": 0.5, "seed": model.seed("a")}] * 3 == host.calls
    assert {"tokens": 7.0} == host.counts
    assert ("policy",) == model.uses


@pytest.mark.parametrize(("code", "calls"), [("reward.http", 2), ("reward.context", 1), ("reward.secret", 1)])
def test_the_last_failure_is_raised(code: str, calls: int) -> None:
    """What another attempt does not mend is not tried again."""
    host = Host(failures=9, code=code)
    with pytest.raises(RewardError) as caught:
        ask(host.model(retries=1))
    assert (code, calls) == (caught.value.code, len(host.calls))


def test_seeds_follow_from_what_is_asked() -> None:
    model = Host(0).model()
    assert model.seed("a", 1) == model.seed("a", 1) != model.seed("a", 2)
    assert all(0 <= model.seed(number) < 2**31 for number in range(50))


def test_another_model_of_the_run_is_not_the_policy() -> None:
    assert () == Host(0).model(model="judge").uses
    assert () == Host(0).model(url="http://127.0.0.1:1/v1", model="far").uses


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"model": ""}, "model"),
        ({"url": "ftp://host"}, "url"),
        ({"api_key_env": "KEY"}, "api_key_env"),
        ({"input_price": 1.0}, "input_price"),
        ({"sampling": {"seed": 1}}, "sampling"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AskingConfig(**settings)
    assert where == caught.value.where
