"""Keys, programs that are started elsewhere, and rewards."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest

from jackfield.abc.agent import AgentLoopOutput
from jackfield.errors import AgentError, ConfigError

MESSAGES: Any = [{"role": "user", "content": "q"}]


async def chat(url: str, key: str, **options: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, **{"max_retries": 0, **options}) as api:
        return await api.chat.completions.create(model="m", messages=MESSAGES)


async def post(url: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}{path}", json=body) as response,
    ):
        return response.status, await response.json()


def begin(served: Any, question: str = "q", **options: Any) -> asyncio.Task[AgentLoopOutput]:
    return asyncio.create_task(served.run(question, **options))


def test_an_external_program_takes_a_rollout_asks_and_finishes_it_with_a_reward(serve: Any, exact: Any) -> None:
    """What it needs is in the answer to its first request."""

    async def run() -> None:
        async with serve() as served:
            rollout = begin(served, deadline=10.0**10)
            status, told = await post(served.url, "/rollouts", "any", {})
            assert (200, "q", served.url) == (status, told["task"]["task_id"], told["base_url"])
            assert told["seconds_left"] > 0
            await chat(told["base_url"], told["key"])
            body = {"reward": 0.5, "metrics": {"steps": 3}}
            assert 200 == (await post(served.url, f"/rollouts/{told['id']}/finish", told["key"], body))[0]
            output = await rollout
            assert [0.5] == [sequence.reward for sequence in output.sequences]
            assert 3 == output.metrics["steps"]
            exact(served.model, output.sequences)
            status, late = await post(served.url, f"/rollouts/{told['id']}/reward", told["key"], {"reward": 1})
            assert (410, "rollout_ended") == (status, late["error"]["code"])

    asyncio.run(run())


def test_a_program_with_a_key_of_its_own_needs_to_know_only_the_address(serve: Any, exact: Any) -> None:
    """Keys ``GROUP/N`` of one group take rollouts of one task; a rollout without requests for a while ends."""

    async def run() -> None:
        async with serve(program={"external": True, "idle_seconds": 1.0}) as served:
            rollouts = [begin(served, question) for question in ("one", "one", "two")]
            await asyncio.sleep(0)
            keys = ("b/1", "a/1", "b/2", "b/1")
            for key in keys:
                assert 200 == (await post(served.url, "/chat/completions", key, {"messages": MESSAGES}))[0]
            outputs = await asyncio.gather(*rollouts)
            assert 3 == len(served.model.asked)  # the second request of b/1 was a repeat
            assert [1, 0] == sorted((output.metrics["repeats"] for output in outputs[:2]), reverse=True)
            exact(served.model, [sequence for output in outputs for sequence in output.sequences])

    asyncio.run(run())


def test_a_key_may_take_another_rollout_when_it_asks_for_one(serve: Any) -> None:
    """A late request of the ended rollout does not."""

    async def run() -> None:
        async with serve() as served:
            for _ in range(2):
                rollout = begin(served)
                assert 200 == (await post(served.url, "/rollouts", "x", {"name": "mine/1"}))[0]
                await chat(served.url, "mine/1")
                await post(served.url, "/rollouts/mine/1/finish", "mine/1")
                assert "answered" == (await rollout).end_reason
                with pytest.raises(openai.APIStatusError) as late:
                    await chat(served.url, "mine/1")
                assert 410 == late.value.status_code
            assert 2 == len(served.model.asked)

    asyncio.run(run())


def test_without_a_free_rollout_clients_are_told_to_come_back(serve: Any) -> None:
    """503 with Retry-After, which OpenAI's client obeys: its retry finds the rollout that has opened."""

    async def run() -> None:
        async with serve(program={"external": True, "claim_seconds": 0.0}) as served:
            with pytest.raises(openai.InternalServerError) as none:
                await chat(served.url, "a/1")
            assert (503, "no_rollout", "1") == (
                none.value.status_code,
                none.value.code,
                none.value.response.headers["Retry-After"],
            )
            asking = asyncio.create_task(chat(served.url, "a/1", max_retries=3))
            rollout = begin(served)
            await asking
            await post(served.url, "/rollouts/a/1/finish", "a/1")
            assert 1 == len((await rollout).sequences)

    asyncio.run(run())


def test_a_claim_waits_for_a_rollout_to_open(serve: Any) -> None:
    """A program that comes before the run has a rollout gets the first one."""

    async def run() -> None:
        async with serve() as served:
            asking = [asyncio.create_task(chat(served.url, key)) for key in ("a/1", "a/1", "a/2")]
            await asyncio.sleep(0.05)
            rollouts = [begin(served), begin(served)]
            await asyncio.gather(*asking)
            for key in ("a/1", "a/2"):
                await post(served.url, f"/rollouts/{key}/reward", key, {"reward": 1, "finish": True})
            outputs = await asyncio.gather(*rollouts)
            assert [[1.0], [1.0]] == [[sequence.reward for sequence in output.sequences] for output in outputs]

    asyncio.run(run())


def test_a_group_whose_task_has_no_further_rollout_is_told_so_and_not_to_come_back(serve: Any) -> None:
    """Status 400, which clients do not try again; another group still has to wait, or gets a rollout."""

    async def run() -> None:
        async with serve(program={"external": True, "claim_seconds": 0.0}) as served:
            rollouts = [begin(served, "one")]
            await asyncio.sleep(0)
            await chat(served.url, "a/1")
            for free in (False, True):
                if free:
                    rollouts.append(begin(served, "two"))
                    await asyncio.sleep(0)
                with pytest.raises(openai.BadRequestError) as full:
                    await chat(served.url, "a/2", max_retries=3)
                assert ("group_full", True) == (full.value.code, "'a'" in str(full.value))
            await chat(served.url, "b/1")
            for key in ("c/1", "alone"):
                with pytest.raises(openai.InternalServerError):
                    await chat(served.url, key)
            rollouts.append(begin(served, "one"))
            await asyncio.sleep(0)
            await chat(served.url, "a/2")
            for key in ("a/1", "a/2", "b/1"):
                await post(served.url, f"/rollouts/{key}/finish", key)
            await asyncio.gather(*rollouts)

    asyncio.run(run())


def test_only_its_own_keys_reward_finish_and_use_a_rollout(serve: Any) -> None:
    """On loopback without a key of the gateway: neither other keys nor the rollout's id do."""

    async def run() -> None:
        async with serve() as served:
            rollouts = [begin(served), begin(served)]
            await asyncio.sleep(0)
            told = (await post(served.url, "/rollouts", "x"))[1]
            await chat(served.url, "a/1")
            for name in (told["id"], "a/1"):
                for key in ("", "wrong", told["id"], "a/2", "jf-x"):
                    for path in ("reward", "finish"):
                        status = (await post(served.url, f"/rollouts/{name}/{path}", key, {"reward": 1.0}))[0]
                        assert 401 == status, (name, key, path)
            asked = {"messages": MESSAGES}
            assert 401 == (await post(served.url, "/chat/completions", told["id"], asked))[0]
            assert 401 == (await post(served.url, "/rollouts", "x", {"name": told["id"]}))[0]
            with pytest.raises(openai.AuthenticationError):
                await chat(served.url, "wrong", default_headers={"X-Jackfield-Rollout": told["id"]})
            assert 401 == (await post(served.url, f"/rollouts/{told['id']}/finish", "a/1"))[0]
            assert 401 == (await post(served.url, "/rollouts/a/1/finish", told["key"]))[0]
            await chat(told["base_url"], told["key"])
            for name, key in ((told["id"], told["key"]), ("a/1", "a/1")):
                assert 200 == (await post(served.url, f"/rollouts/{name}/finish", key, {"reward": 0.5}))[0]
            outputs = await asyncio.gather(*rollouts)
            assert [0.5, 0.5] == [sequence.reward for output in outputs for sequence in output.sequences]

    asyncio.run(run())


def test_with_a_key_of_the_gateway_ids_and_own_keys_alone_open_nothing(serve: Any) -> None:
    """An id can be guessed, and an own key seen: both need the gateway's key."""

    async def run() -> None:
        secrets = {"KEY": "secret"}.__getitem__
        async with serve(secrets=secrets, api_key_env="KEY") as served:
            rollout = begin(served)
            await asyncio.sleep(0)
            told = (await post(served.url, "/rollouts", "secret", {"name": "a/1"}))[1]
            for key in (told["id"], "a/1"):
                assert 401 == (await post(served.url, "/chat/completions", key, {"messages": MESSAGES}))[0]
                assert 401 == (await post(served.url, f"/rollouts/{told['id']}/finish", key))[0]
            await chat(served.url, "secret/a/1")
            assert 200 == (await post(served.url, "/rollouts/a/1/finish", "secret/a/1"))[0]
            assert 1 == len((await rollout).sequences)

    asyncio.run(run())


def test_a_restarted_rollout_has_another_key_and_ends_the_requests_of_the_first_attempt(serve: Any) -> None:
    """A late request of the dropped attempt is recorded nowhere."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout:
            served.model.gate, dropped, first = asyncio.Event(), rollout.recording, rollout.key
            asking = asyncio.create_task(chat(served.url, first))
            await served.model.arrived.wait()
            await served.shared.gateway.restart(rollout)
            for request in (asking, chat(served.url, first)):
                with pytest.raises(openai.APIStatusError) as ended:
                    await request
                assert (410, "rollout_ended") == (ended.value.status_code, ended.value.code)
            assert (1, ()) == (served.model.cancelled, dropped.sequences())
            served.model.gate.set()
            await chat(served.url, rollout.key)
            assert (1, 1) == (len(rollout.recording.sequences()), rollout.restarts)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("reward", {"reward": 1, "typo": 3}, "typo"),
        ("finish", {"reward": 1, "typo": 3}, "typo"),
        ("finish", {"rewrad": 1}, "rewrad"),
        ("reward", {"reward": 1, "finish": "yes"}, "finish"),
    ],
)
def test_a_misspelt_field_beside_a_reward_is_refused_by_its_name(serve: Any, path: str, body: Any, param: str) -> None:
    """Nothing of the body counts."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout:
            status, found = await post(served.url, f"/rollouts/{rollout.name}/{path}", rollout.key, body)
            assert (400, param) == (status, found["error"]["param"])
            assert (None, False) == (rollout.reward, rollout.finished.is_set())
            assert 400 == (await post(served.url, "/rollouts", "x", {"nmae": "a/1"}))[0]

    asyncio.run(run())


def test_a_reward_may_come_after_the_end_if_the_run_waits_for_it(serve: Any) -> None:
    """Without it in time, the rollout has none, and the reward agent scores."""

    async def run() -> None:
        async with serve(reward_seconds=5.0) as served:
            rollout = begin(served)
            await chat(served.url, "a/1")
            await post(served.url, "/rollouts/a/1/finish", "a/1")
            assert 200 == (await post(served.url, "/rollouts/a/1/reward", "a/1", {"reward": -2}))[0]
            assert [-2.0] == [sequence.reward for sequence in (await rollout).sequences]
        async with serve(reward_seconds=0.05) as served:
            rollout = begin(served)
            await chat(served.url, "a/1")
            await post(served.url, "/rollouts/a/1/finish", "a/1")
            assert [None] == [sequence.reward for sequence in (await rollout).sequences]
            assert ["no_reward"] == [name for name, _ in served.events]

    asyncio.run(run())


@pytest.mark.parametrize("body", [{}, {"reward": "much"}, {"reward": True, "metrics": 1}, [1], {"reward": None}])
def test_a_reward_that_is_none_is_refused(serve: Any, body: Any) -> None:
    """The rollout stays open."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout:
            status, found = await post(served.url, f"/rollouts/{rollout.name}/reward", rollout.key, body)
            assert (400, None) == (status, rollout.reward), found

    asyncio.run(run())


def test_a_program_that_asks_nothing_fails_its_rollout(serve: Any) -> None:
    """An empty rollout is no sample."""

    async def run() -> None:
        async with serve() as served:
            rollout = begin(served)
            await post(served.url, "/rollouts", "x", {"name": "a/1"})
            await post(served.url, "/rollouts/a/1/finish", "a/1")
            with pytest.raises(AgentError) as error:
                await rollout
            assert "agent.program" == error.value.code

    asyncio.run(run())


def test_keys_keep_strangers_out(serve: Any) -> None:
    """With a key of the gateway: none, a wrong one, another rollout's; the header names a rollout."""

    async def run() -> None:
        secrets = {"KEY": "secret"}.__getitem__
        async with serve(secrets=secrets, api_key_env="KEY") as served, served.rollout() as rollout:
            name = rollout.name
            for key in ("wrong", "wrong/a/1", "secret", f"secret{name}"):
                with pytest.raises(openai.AuthenticationError):
                    await chat(served.url, key)
            for key, path in (("wrong", "/rollouts"), ("wrong", f"/rollouts/{name}/reward")):
                assert 401 == (await post(served.url, path, key, {"reward": 1}))[0]
            assert 200 == (await post(served.url, f"/rollouts/{name}/reward", "secret", {"reward": 1}))[0]
            await chat(served.url, rollout.key)
            await chat(served.url, "secret", default_headers={"X-Jackfield-Rollout": name})
            with pytest.raises(openai.AuthenticationError):
                await chat(served.url, "wrong", default_headers={"X-Jackfield-Rollout": name})
            assert (1, 1) == (rollout.recording.repeats, len(served.model.asked))

    asyncio.run(run())


def test_beyond_loopback_a_key_is_needed(serve: Any) -> None:
    """The gateway does not start without one."""

    async def run() -> None:
        async with serve(host="0.0.0.0"):
            pytest.fail("it has started")

    with pytest.raises(ConfigError) as error:
        asyncio.run(run())
    assert ("config.invalid-value", "agent.api_key_env") == (error.value.code, error.value.where)


def test_a_run_that_starts_its_programs_takes_no_strangers(serve: Any) -> None:
    """Own keys and claims are for external programs."""

    async def run() -> None:
        call = "jackfield_agent_gateway.conformance:converse"
        async with serve(program={"call": call, "process": False}) as served:
            with pytest.raises(openai.AuthenticationError):
                await chat(served.url, "a/1")
            assert 404 == (await post(served.url, "/rollouts", "x"))[0]

    asyncio.run(run())


def test_the_address_is_written_down_and_models_are_listed(serve: Any, tmp_path: Any) -> None:
    """Programs elsewhere find the address in a file; clients that look at the models find one."""

    async def run() -> None:
        file = tmp_path / "folder" / "address"
        async with serve(address_file=str(file)) as served:
            assert f"{served.url}\n" == file.read_text()
            async with openai.AsyncOpenAI(base_url=served.url, api_key="x") as api:
                assert ["policy"] == [model.id async for model in api.models.list()]
                assert "gpt-5" == (await api.models.retrieve("gpt-5")).id

    asyncio.run(run())


def test_an_unread_field_or_a_bad_message_is_refused_by_its_name(serve: Any) -> None:
    """As OpenAI does; nothing reaches the model."""

    async def run() -> None:
        async with serve() as served, served.rollout() as rollout:
            for body, param in (
                ({"messages": []}, "messages"),
                ({"messages": [{"role": "user"}]}, "messages[0].content"),
                ({"messages": MESSAGES, "tools": [{"type": "web_search"}]}, "tools[0]"),
                ({"messages": MESSAGES, "tool_choice": 3}, "tool_choice"),
                ({"messages": MESSAGES, "logit_bias": {"1": 1}}, "logit_bias"),
                ({"messages": MESSAGES, "n": 0}, "n"),
            ):
                status, found = await post(served.url, "/chat/completions", rollout.key, body)
                assert (400, param) == (status, found["error"]["param"])
            assert not served.model.asked

    asyncio.run(run())
