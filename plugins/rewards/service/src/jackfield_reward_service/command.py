"""``jackfield rewards push`` and ``jackfield rewards pending``."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import attrs
import click

from jackfield.errors import RewardError
from jackfield_reward_service import pushing
from jackfield_reward_service.store import Reward

_SHOWN = 60  #: characters of a response in the table
_WHERE = click.argument("where")


def _as_json(command: Any) -> Any:
    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta["jackfield.json"] = value  # errors are then JSON, too
        return value

    return click.option("--json", "as_json", is_flag=True, callback=remember, help="Print JSON.")(command)


_TOKEN = click.option("--token-env", help="Environment variable with the token, if WHERE is a URL.")


@click.command()
@_WHERE
@click.argument("key", required=False)
@click.argument("score", required=False, type=float)
@click.option("--explanation", help="Why it has this score.")
@click.option("--file", type=click.Path(path_type=Path, dir_okay=False), help="Rewards as JSON lines instead.")
@_TOKEN
@_as_json
def push(
    where: str,
    key: str | None,
    score: float | None,
    explanation: str | None,
    file: Path | None,
    token_env: str | None,
    as_json: bool,
) -> None:
    """Give the sample KEY of `jackfield rewards pending` its SCORE.

    WHERE is the folder of the reward `lagged`, also while no run is at work, or the URL of a run. With --file, each
    line is {"key": ..., "score": ...}, perhaps with explanation and dimensions; if one is refused, none is taken. After
    `--`, a score may be negative.
    """
    if (file is None) == (score is None) or (file is not None and explanation is not None):
        raise click.UsageError("give KEY and SCORE, or --file alone")
    if file is None:
        values = {"key": key, "score": score, "explanation": explanation}
        rewards = [Reward.of(values, "SCORE")]
    else:
        rewards = _read(file)
    pushed = pushing.push_all(where, rewards, token=_token(token_env))
    known = f", {pushed.known} of them known" if pushed.known else ""
    click.echo(json.dumps(attrs.asdict(pushed)) if as_json else f"{len(rewards)} rewards pushed{known}")


@click.command()
@_WHERE
@click.option("--limit", default=1000, show_default=True, type=click.IntRange(1), help="At most so many samples.")
@_TOKEN
@_as_json
def pending(where: str, limit: int, token_env: str | None, as_json: bool) -> None:
    """List the samples that wait for a reward, the oldest first (--json: one per line, with their texts).

    WHERE is the folder of the reward `lagged`, or the URL of a run.
    """
    found = pushing.pending(where, limit=limit, token=_token(token_env))
    for each in found:
        text = textwrap.shorten(each.response, _SHOWN, placeholder=" …")
        click.echo(json.dumps(attrs.asdict(each), ensure_ascii=False) if as_json else f"{each.key}  {text}")
    if not found and not as_json:
        click.echo("none")


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    if token := os.environ.get(variable):
        return token
    raise RewardError("a token is missing", code="reward.secret", where=variable, fix=f"export {variable}=…")


def _read(file: Path) -> list[Reward]:
    rewards = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                values = json.loads(line)
            except ValueError as error:
                where = f"{file}:{number}"
                raise RewardError("a line is not JSON", code="reward.pushed", where=where, found=error) from error
            rewards.append(Reward.of(values, f"{file}:{number}"))
    return rewards
