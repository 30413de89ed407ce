"""``jackfield rewards push`` and ``pending``, the commands of the reward ``lagged``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.cli import main
from jackfield.plugins import load_plugin
from jackfield_reward_service import pending
from jackfield_testing import in_loop


@asynccontextmanager
async def waiting(folder: Path, **settings: Any) -> AsyncIterator[list[asyncio.Task[ScoreResult]]]:
    """Have two samples wait for their rewards."""
    options = {"folder": str(folder), "poll_seconds": 0.01, **settings}
    agent: RewardAgent = load_plugin("reward", "lagged").build(options, RewardContext())
    fields: Any = {"data_source": "sums", "solution_str": "four", "ground_truth": "4"}
    requests = [ScoreRequest(idempotency_key=f"train/{number}", **fields) for number in (1, 2)]
    try:
        await agent.start()
        tasks = [asyncio.ensure_future(agent.compute_score(each)) for each in requests]
        async with asyncio.timeout(30):
            while len(pending(folder)) < 2:
                await asyncio.sleep(0)
        yield tasks
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    finally:
        await agent.close()


def done(*arguments: str, **environment: str) -> tuple[int, str]:
    """Return the exit code of `jackfield rewards ARGUMENTS` and what it printed."""
    result = CliRunner(env=environment).invoke(main, ["rewards", *arguments])
    return result.exit_code, result.output


@in_loop
async def test_a_command_pushes_over_http(tmp_path: Path) -> None:
    """The token is in the environment; the sample has its reward at once."""
    async with waiting(tmp_path, port=0, poll_seconds=1000.0) as tasks:
        url, token = ((tmp_path / name).read_text().strip() for name in ("url", "token"))
        (key, _) = (each.key for each in pending(tmp_path))
        arguments = ("push", url, key, "0.5", "--token-env", "REWARDS", "--explanation", "half", "--json")
        code, text = await asyncio.to_thread(done, *arguments, REWARDS=token)
        assert (code, json.loads(text)) == (0, {"new": 1, "known": 0})
        assert (await tasks[0]).explanation == "half"
        code, text = await asyncio.to_thread(done, "pending", url, "--token-env", "REWARDS", REWARDS="another")
        assert code == 1
        assert "reward.token" in text
        assert "another" not in text


def test_the_commands_push_and_list(tmp_path: Path) -> None:
    """A file of rewards is taken whole or not at all; errors name the line."""

    async def register() -> None:
        async with waiting(tmp_path):
            pass

    asyncio.run(register())
    one, two = (each.key for each in pending(tmp_path))
    assert done("pending", str(tmp_path)) == (0, f"{one}  four\n{two}  four\n")
    code, text = done("pending", str(tmp_path), "--json", "--limit", "1")
    assert (code, json.loads(text)["key"]) == (0, one)
    file = tmp_path / "scores.jsonl"
    file.write_text(json.dumps({"key": one, "score": 1}) + "\n\n" + json.dumps({"key": two}) + "\n")
    code, text = done("push", str(tmp_path), "--file", str(file))
    assert code == 1
    assert f"{file}:3" in text
    assert len(pending(tmp_path)) == 2
    file.write_text("".join(json.dumps({"key": key, "score": 1}) + "\n" for key in (one, two)))
    assert done("push", str(tmp_path), "--file", str(file)) == (0, "2 rewards pushed\n")
    assert done("push", str(tmp_path), one, "1") == (0, "1 rewards pushed, 1 of them known\n")
    code, text = done("push", str(tmp_path), "--json", "--", one, "-1")
    assert (code, json.loads(text)["error"]["code"]) == (1, "reward.conflict")
    assert done("push", str(tmp_path), one)[0] == 2
    assert done("push", str(tmp_path), one, "1", "--file", str(file))[0] == 2
    assert done("pending", str(tmp_path)) == (0, "none\n")
    assert "reward.store" in done("pending", str(tmp_path / "elsewhere"))[1]
    assert "reward.secret" in done("pending", "http://127.0.0.1:9", "--token-env", "NO_SUCH_VARIABLE")[1]
    assert "reward.http" in done("pending", "http://127.0.0.1:9")[1]
