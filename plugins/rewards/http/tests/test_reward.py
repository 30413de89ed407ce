"""Requests and answers of the reward ``http``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.sdk import structure
from jackfield_bad_service import BadService, bad_service
from jackfield_reward_http.reward import HttpReward
from jackfield_reward_http.settings import HttpRewardConfig
from jackfield_testing import refused

REQUEST = ScoreRequest(
    data_source="set",
    solution_str="four",
    ground_truth="4",
    extra_info={"id": 7, "tests": ["a", "b"]},
    idempotency_key="train/1",
    group_id="group",
    deadline_seconds=30,
)


def serve(
    act: Callable[[HttpReward, BadService], Awaitable[Any]], answer: Any = None, /, **settings: Any
) -> tuple[Any, BadService]:
    """Do something with an agent and the service that it asks, which answers with ``answer``."""

    async def main() -> tuple[Any, BadService]:
        async with bad_service(lambda body: answer) as service:
            given = {name: _at(service, value) for name, value in settings.items()}
            given = {"url": f"{service.address}/score", **given}
            agent = HttpReward(structure(HttpRewardConfig, given), RewardContext())
            try:
                await agent.start()
                return await act(agent, service), service
            finally:
                await agent.close()

    return asyncio.run(main())


def _at(service: BadService, value: Any) -> Any:
    return value.replace("ADDRESS", service.address) if isinstance(value, str) else value


def score(answer: Any, /, request: ScoreRequest = REQUEST, **settings: Any) -> tuple[ScoreResult, BadService]:
    return serve(lambda agent, _: agent.compute_score(request), answer, **settings)


def test_defaults() -> None:
    result, service = score({"score": 0.5})
    assert ("ok", 0.5, '{"score": 0.5}') == (result.status, result.score, result.raw)
    names = ("data_source", "prompt_str", "solution_str", "ground_truth", "extra_info")
    assert [{name: getattr(REQUEST, name) for name in names}] == service.bodies
    assert service.headers[0]["Idempotency-Key"].startswith("train/1@")


def test_a_request_and_an_answer_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", "open sesame")
    answer = {"out": [{"value": True, "parts": {"style": 0.25, "facts": 1}, "why": {"because": 1}, "used": 40}]}
    result, service = score(
        answer,
        body={"text": "so: {solution_str}", "id": "{extra_info.id}", "tests": "{extra_info.tests}", "kind": ["sum", 1]},
        headers={"X-Api-Key": "${SERVICE_KEY}"},
        idempotency_header="X-Request",
        answer={
            "score": "out.0.value",
            "dimensions": {"style": "out.0.parts.style", "facts": "out.0.parts.facts"},
            "explanation": "out.0.why",
            "raw": "out.0.parts",
            "tokens": "out.0.used",
        },
    )
    assert [{"text": "so: four", "id": 7, "tests": ["a", "b"], "kind": ["sum", 1]}] == service.bodies
    sent = service.headers[0]
    assert ("open sesame", "train/1") == (sent["X-Api-Key"], sent["X-Request"].partition("@")[0])
    expected = ScoreResult(
        score=1.0,
        dimensions={"style": 0.25, "facts": 1.0},
        explanation='{"because":1}',
        raw='{"style":0.25,"facts":1}',
        tokens=40,
    )
    assert result.seconds > 0
    assert expected == attrs.evolve(result, seconds=0.0)


@pytest.mark.parametrize("answer", [{"score": "swordfish"}, {"score": 1, "error": "swordfish"}, {"swordfish": 1}])
def test_a_secret_that_a_service_repeats_is_not_shown(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", "swordfish")
    result, service = score(answer, headers={"X-Key": "${SERVICE_KEY}"}, answer={"error": "error"})
    assert ("failed", "swordfish") == (result.status, service.headers[0]["X-Key"])
    assert "swordfish" not in str(result)


@pytest.mark.parametrize("nothing", [None, False, ""])
def test_an_error_that_is_empty_is_none(nothing: Any) -> None:
    assert 1.0 == score({"score": 1, "error": nothing}, answer={"error": "error"})[0].score


def test_a_long_answer_is_refused() -> None:
    assert "ok" == score({"score": 1, "x": "x" * 50}, answer_bytes=100)[0].status
    result, _ = score({"score": 1, "x": "x" * 100}, answer_bytes=100)
    assert ("failed", True) == (result.status, "[reward.http]" in str(result.error))


def test_a_bare_number_is_a_score() -> None:
    assert 0.75 == score(0.75, answer={"score": ""})[0].score


@pytest.mark.parametrize(
    ("answer", "paths", "shown"),
    [
        ({"points": 1}, {}, "points"),
        ({"score": None}, {}, "NoneType"),
        ({"score": "1"}, {}, "'1'"),
        ({"score": 1, "parts": [1]}, {"dimensions": {"style": "parts.1"}}, "a list of 1"),
        ({"score": 1}, {"explanation": "why"}, "no why"),
        ({"score": 1, "used": "many"}, {"tokens": "used"}, "many"),
    ],
)
def test_a_wrong_path_or_type_says_what_was_found(answer: Any, paths: Any, shown: str) -> None:
    result, _ = score(answer, answer=paths)
    assert ("failed", None, False) == (result.status, result.score, result.is_final)
    assert "[reward.output]" in str(result.error)
    assert shown in str(result.error)
    assert result.raw, "what the service has answered is kept"


def test_a_task_without_a_value_of_the_template_is_not_asked_about() -> None:
    result, service = score({"score": 1}, body="{extra_info.absent}")
    assert ("failed", True, []) == (result.status, result.is_final, service.bodies)
    assert "[reward.template]" in str(result.error)


def test_a_retry_has_the_same_key_and_another_sample_or_response_another() -> None:
    """A run that resumes may have another response under the key of the sample."""
    others = attrs.evolve(REQUEST, idempotency_key="train/2"), attrs.evolve(REQUEST, solution_str="another")

    async def act(agent: HttpReward, service: BadService) -> list[str]:
        for request in (REQUEST, attrs.evolve(REQUEST, retry=1), *others):
            await agent.compute_score(request)
        return [sent["Idempotency-Key"] for sent in service.headers]

    first, again, *rest = serve(act, {"score": 1})[0]
    assert first == again
    assert 3 == len({first, *rest})
    assert ["train/2", "train/1"] == [each.partition("@")[0] for each in rest]


GROUP = [attrs.evolve(REQUEST, solution_str=str(n), idempotency_key=f"train/{n}") for n in range(3)]
GROUP_SETTINGS: dict[str, Any] = {
    "body": {"text": "{solution_str}"},
    "group": {"body": {"of": "{group_id}", "all": "{samples}"}, "answers": "out"},
}


def test_a_group_is_one_request() -> None:
    async def act(agent: HttpReward, service: BadService) -> Any:
        assert agent.compares
        await agent.score_group(GROUP)
        return await agent.score_group([attrs.evolve(each, retry=1) for each in GROUP])

    answer = {"out": [{"score": 1}, {"score": "?"}, {"score": 0}]}
    results, service = serve(act, answer, **GROUP_SETTINGS)
    assert {"of": "group", "all": [{"text": "0"}, {"text": "1"}, {"text": "2"}]} == service.bodies[0]
    assert [("ok", 1.0), ("failed", None), ("ok", 0.0)] == [(each.status, each.score) for each in results]
    assert 1 == len({sent["Idempotency-Key"] for sent in service.headers}), "a retry of a group has the same key"


@pytest.mark.parametrize("out", [[{"score": 1}] * 2, {"score": 1}, "text"])
def test_a_group_with_too_few_answers_fails(out: Any) -> None:
    results, _ = serve(lambda agent, _: agent.score_group(GROUP), {"out": out}, **GROUP_SETTINGS)
    assert ["failed"] * 3 == [each.status for each in results]
    assert all("[reward.output]" in each.error and "a list of 3" in each.error for each in results)


def test_a_sample_alone_is_a_group_of_one() -> None:
    result, service = score({"out": [{"score": 0.5}]}, **GROUP_SETTINGS)
    assert (0.5, 1) == (result.score, len(service.bodies))


def test_without_a_group_setting_each_sample_is_asked_for() -> None:
    async def act(agent: HttpReward, service: BadService) -> Any:
        assert not agent.compares
        return await agent.score_group(GROUP)

    results, service = serve(act, {"score": 0.5})
    assert ([0.5] * 3, 3) == ([each.score for each in results], len(service.bodies))


def test_a_get_request_has_parameters() -> None:
    async def act(agent: HttpReward, service: BadService) -> Any:
        return await agent.compute_score(attrs.evolve(REQUEST, solution_str="a&b"))

    settings = {"method": "GET", "query": {"text": "{solution_str}", "id": "{extra_info.id}"}}
    result, service = serve(act, **settings, answer_bytes=100)
    assert "[reward.output]" in result.error, "the service lists its models"
    assert ["/score?text=a%26b&id=7"] == service.paths


def test_a_service_that_is_not_there_is_refused_at_the_start() -> None:
    async def act(agent: HttpReward, service: BadService) -> Any:
        return service.paths

    assert ["/health"] == serve(act, health="ADDRESS/health")[0]
    with refused("reward.http", "127.0.0.1:1"):
        serve(act, health="http://127.0.0.1:1/health", start_seconds=0.5)
    with refused("reward.secret", "NO_SUCH_KEY"):
        serve(act, headers={"Authorization": "Bearer ${NO_SUCH_KEY}"})


def test_the_version_is_what_the_settings_say() -> None:
    for version in (None, "7"):
        agent = HttpReward(structure(HttpRewardConfig, {"url": "http://x", "version": version}), RewardContext())
        assert version == agent.version


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"url": "host/score"}, "url"),
        ({"body": "{solution}"}, "body"),
        ({"query": {"q": "{solution}"}}, "query"),
        ({"group": {"body": "{sample}"}}, "group.body"),
        ({"headers": {"Authorization": "Bearer abc"}}, "headers.Authorization"),
        ({"success": ["ok"]}, "success"),
        ({"retryable": [42]}, "retryable"),
        ({"method": "GET", "body": "x"}, "body"),
        ({"method": "GET", "group": {}}, "group"),
        ({"query": {"a": "b"}, "group": {}}, "query"),
        ({"start_seconds": 5}, "start_seconds"),
    ],
)
def test_settings_that_are_wrong_or_without_effect_are_refused(settings: dict[str, Any], named: str) -> None:
    with refused("config.invalid-value", named) as caught:
        structure(HttpRewardConfig, {"url": "http://host", **settings})
    assert "abc" not in str(caught.value)
