"""Rewards that several runs share: a real service, killed and started again, and its clients."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import jackfield_held
from jackfield.errors import RewardError, RpcError
from jackfield_testing import in_loop

from .conftest import Held, Serve, connected, request

QUICK, HELD = 40, 40


async def refusal(address: str, **settings: Any) -> RewardError:
    """Return the error of a run that does not get a connection."""
    with pytest.raises(RewardError) as refused:
        async with connected(address, **settings):
            pass
    return refused.value


@in_loop
async def test_a_kill_in_the_middle_of_many_requests_loses_and_repeats_nothing(
    serve: Serve, free_port: int, tmp_path: Path
) -> None:
    """All samples get their scores from the service that starts again; what was scored is not scored twice."""
    quick = [request(tmp_path, f"quick-{number}") for number in range(QUICK)]
    held = [request(tmp_path, f"held-{number}") for number in range(HELD)]
    address = tmp_path / "service" / "address.json"
    async with Held(tmp_path) as gate, serve(port=free_port) as service, connected(address) as run:
        assert service.said["port"] == free_port
        before = await asyncio.gather(*map(run.compute_score, quick))
        waiting = [asyncio.ensure_future(run.compute_score(each)) for each in held]
        await gate.wait_for(lambda: gate.count >= 2)  # both workers
        assert await service.end(signal.SIGKILL) == -signal.SIGKILL
        gate.release()
        async with serve(port=free_port), connected(address) as restarted:
            after = await asyncio.gather(*waiting)
            again = await asyncio.gather(*map(restarted.compute_score, [*quick, *held]))
    assert [each.score for each in before] == [float(len(each.solution_str)) for each in quick]
    assert [each.score for each in after] == [float(len(each.solution_str)) for each in held]
    assert again == [*before, *after]
    repeated = {text for text in gate.calls if gate.calls.count(text) > 1}
    assert len(gate.calls) == QUICK + HELD + len(repeated)
    assert len(repeated) <= 2, "only what the killed workers had begun is scored again"
    assert all("held" in text for text in repeated)


@in_loop
async def test_a_run_that_ends_and_starts_again_gets_scores_that_were_paid(serve: Serve, tmp_path: Path) -> None:
    """A score goes on when its run is gone, for some time, and the run that asks again waits for the same call."""
    asked = request(tmp_path, "held-by-a-run-that-ends")
    code = (
        "import asyncio, sys\n"
        "sys.path[:0] = sys.argv[2:]\n"
        "from conftest import connected, request\n"
        "from pathlib import Path\n"
        "async def main():\n"
        "    folder = Path(sys.argv[1])\n"
        "    async with connected(folder / 'service' / 'address.json') as run:\n"
        "        await run.compute_score(request(folder, 'held-by-a-run-that-ends'))\n"
        "asyncio.run(main())\n"
    )
    async with Held(tmp_path) as gate, serve():
        modules = (str(Path(each).parent) for each in (__file__, jackfield_held.__file__))
        arguments = [sys.executable, "-c", code, str(tmp_path), *modules]
        process = await asyncio.create_subprocess_exec(*arguments)
        await gate.wait_for(lambda: gate.count >= 1)
        process.kill()
        await process.wait()
        async with connected(tmp_path / "service" / "address.json") as run:
            again = asyncio.ensure_future(run.compute_score(asked))
            await run.compute_score(request(tmp_path, "another"))  # the service has the first request, too
            gate.release()
            assert (await again).score == float(len(asked.solution_str))
    assert sorted(gate.calls) == ["another", asked.solution_str]


@in_loop
async def test_a_cancelled_score_ends_at_the_service(serve: Serve, tmp_path: Path) -> None:
    """Workers are free again when a run gives a score up."""
    async with Held(tmp_path) as gate, serve(), connected(tmp_path / "service" / "address.json") as run:
        held = [asyncio.ensure_future(run.compute_score(request(tmp_path, f"held-{n}"))) for n in range(2)]
        await gate.wait_for(lambda: gate.count >= 2)
        for each in held:
            each.cancel()
        assert (await run.compute_score(request(tmp_path, "quick"))).score == 5.0
        (about,) = [each for each in await _status(tmp_path) if each["name"] == "held"]
        assert (about["in_progress"], about["waiting"], about["clients"]) == (0, {}, ["a run"])


async def _status(folder: Path) -> list[dict[str, object]]:
    from jackfield_rewards.asking import ask

    return await ask(folder / "service")


@in_loop
async def test_execution_counts_and_waiting_does_not(serve: Serve, tmp_path: Path) -> None:
    """The deadline of a sample begins when it has a worker; one that is late does not delay others for ever."""
    async with (
        Held(tmp_path),
        serve(reward_service={"retries": 0}),
        connected(tmp_path / "service" / "address.json") as run,
    ):
        late = [request(tmp_path, f"held-{n}", deadline_seconds=0.5) for n in range(4)]
        quick = [request(tmp_path, f"quick-{n}", deadline_seconds=30.0) for n in range(4)]
        results = await asyncio.gather(*map(run.compute_score, [*late, *quick]))
    assert [each.status for each in results] == ["timeout"] * 4 + ["ok"] * 4


@in_loop
async def test_a_failure_is_asked_for_again(serve: Serve, tmp_path: Path) -> None:
    """Only scores are remembered; the same key with another text is another sample."""
    settings = {"reward_service": {"retries": 0}}
    async with serve(**settings), connected(tmp_path / "service" / "address.json") as run:
        broken, key = request(tmp_path, "broken"), {"idempotency_key": "train/1"}
        assert [(await run.compute_score(broken)).status for _ in range(2)] == ["failed", "failed"]
        scores = [(await run.compute_score(request(tmp_path, text, **key))).score for text in ("a", "ab", "a")]
    assert scores == [1.0, 2.0, 1.0]
    assert (tmp_path / "calls").read_text().split() == ["broken", "broken", "a", "ab"]


@in_loop
async def test_sigterm_ends_in_order_and_the_run_waits(serve: Serve, free_port: int, tmp_path: Path) -> None:
    """The exit code is that of the signal; the address is gone; a token in the environment stays the same."""
    variables = {"REWARDS_TOKEN": "a token"}
    settings = {"port": free_port, "token_env": "REWARDS_TOKEN"}
    direct = {"token_env": "REWARDS_TOKEN", "reconnect_seconds": 30.0}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("REWARDS_TOKEN", "a token")
        async with serve(variables, **settings) as service, connected(f"127.0.0.1:{free_port}", **direct) as run:
            assert (await run.compute_score(request(tmp_path, "one"))).score == 3.0
            assert await service.end(signal.SIGTERM) == 128 + signal.SIGTERM
            assert not (tmp_path / "service" / "address.json").exists()
            waiting, version = asyncio.ensure_future(run.compute_score(request(tmp_path, "four"))), run.version
            async with serve(variables, **settings, comment="# edited\n"):
                assert (await waiting).score == 4.0
                assert None not in (version, run.version)
                assert version != run.version, "scores of other code have another version"


@in_loop
async def test_without_a_service_the_address_is_named(tmp_path: Path, free_port: int) -> None:
    """The wait is bounded."""
    for address in (str(tmp_path / "address.json"), f"127.0.0.1:{free_port}"):
        options = {"token_env": "REWARDS_TOKEN"} if ":" in address else {}
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("REWARDS_TOKEN", "a token")
            refused = await refusal(address, reconnect_seconds=0.2, **options)
        assert (refused.code, refused.where) == ("reward.unavailable", address)


@in_loop
async def test_a_wrong_token_or_name_is_refused(serve: Serve, free_port: int, tmp_path: Path) -> None:
    """A client is not served without the token, and the error of an unknown reward names it."""
    async with serve(port=free_port) as service:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("REWARDS_TOKEN", "another token")
            direct = {"address": f"127.0.0.1:{free_port}", "token_env": "REWARDS_TOKEN"}
            refused = await refusal(**direct, reconnect_seconds=0.2)
            assert refused.code == "reward.unavailable"
            assert "secret" in str(refused.found)
            patched.setenv("REWARDS_TOKEN", (tmp_path / "service" / "token").read_text().strip())
            async with connected(**direct):
                pass
        refused = await refusal(service.said["address"], served="another")
        assert (refused.code, refused.found) == ("reward.not-served", "another")
        for name in ("address.json", "token"):
            assert (tmp_path / "service" / name).stat().st_mode & 0o077 == 0


@in_loop
async def test_one_service_for_one_folder(serve: Serve, tmp_path: Path) -> None:
    """A second service is refused, and the first goes on."""
    async with serve() as service:
        command = [sys.executable, "-c", "from jackfield.cli import main; main()", "rewards", "serve"]
        pipe = asyncio.subprocess.PIPE
        second = await asyncio.create_subprocess_exec(*command, str(tmp_path / "serve.yaml"), "--json", stdout=pipe)
        out, _ = await asyncio.wait_for(second.communicate(), 30)
        assert second.returncode == 1
        assert json.loads(out)["error"]["code"] == "run.folder-in-use"
        async with connected(service.said["address"]) as run:
            assert (await run.compute_score(request(tmp_path, "one"))).score == 3.0


@in_loop
async def test_the_status_of_no_service_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RpcError) as refused:
        await _status(tmp_path)
    assert refused.value.code == "rpc.address"


@in_loop
async def test_a_sample_that_is_too_long_is_refused_alone(serve: Serve, tmp_path: Path) -> None:
    """Its connection goes on with others."""
    async with serve(), connected(tmp_path / "service" / "address.json") as run:
        with pytest.raises(RewardError) as refused:
            await run.compute_score(request(tmp_path, "x" * (64 * 2**20)))
        assert refused.value.code == "reward.request"
        assert (await run.compute_score(request(tmp_path, "one"))).score == 3.0
