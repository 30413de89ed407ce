"""The command ``jackfield gateway``."""

from __future__ import annotations

import sys
import threading
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from jackfield.cli.commands import config_arguments

if TYPE_CHECKING:
    from jackfield.config import RunConfig

_LOOK_SECONDS = 0.2  #: between two looks at the file of addresses
_HELP = """\
gateway: {address}
  OPENAI_BASE_URL={address} OPENAI_API_KEY={key}GROUP/1 python your_program.py
  curl -X POST {address}/rollouts -H 'Authorization: Bearer {secret}' takes a rollout and tells its task"""


@click.command()
@config_arguments
@click.option("--host", help="Address to listen at; one beyond loopback needs agent.api_key_env.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 takes any free one.")
@click.option("--explore", is_flag=True, help="Only explore, for a run whose controller is served (queue.address).")
def gateway(file: str, overrides: tuple[str, ...], host: str | None, port: int | None, explore: bool) -> None:
    """Run a config FILE whose rollouts are programs that are started elsewhere and speak OpenAI's API.

    OVERRIDES are settings such as mode=explore, which collects samples and trains nothing.
    """
    from jackfield import compose
    from jackfield.compose.builder import Stop
    from jackfield.config import load_config

    config = gateway_config(load_config(file, overrides, served=explore), host, port)
    stop = Stop(config.checkpoint.grace_seconds)
    try:
        with stop.listening(), told_addresses(config):
            result = compose.run(config, role="explore" if explore else "all", stop=stop)
    except CancelledError:
        if stop.code is None:
            raise
        click.echo("ended")
        sys.exit(stop.code)
    if result.stopped:
        sys.exit(stop.code)
    click.echo(f"done; see {result.folder}")


def gateway_config(config: RunConfig, host: str | None, port: int | None) -> RunConfig:
    """Return the configuration with the gateway as its agent, in external mode."""
    is_gateway = config.agent.name in ("gateway", "gateway_images")
    given: dict[str, Any] = dict(config.agent.settings) if is_gateway else {}
    program = given.get("program") or {}
    name = config.agent.name if is_gateway else "gateway"
    more = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    kept = {name: value for name, value in program.items() if name not in ("call", "command", "process", "workers")}
    settings = {
        **{"address_file": str(Path(config.folder) / "gateway.txt")},
        **given,
        **more,
        "program": {**kept, "external": True},
    }
    return attrs.evolve(config, agent=attrs.evolve(config.agent, name=name, settings=settings))


@contextmanager
def told_addresses(config: RunConfig) -> Iterator[None]:
    """Print each address that a worker writes down, and how to use it."""
    file = Path(config.agent.settings["address_file"])
    with suppress(FileNotFoundError):
        file.unlink()  # of an earlier start
    ended, has_key = threading.Event(), config.agent.settings.get("api_key_env")
    words = {"key": "KEY/", "secret": "KEY"} if has_key else {"key": "", "secret": "any"}

    def watch() -> None:
        told: set[str] = set()
        while not ended.wait(_LOOK_SECONDS):
            lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
            for address in lines:
                if address not in told:
                    told.add(address)
                    click.echo(_HELP.format(address=address, **words))

    watching = threading.Thread(target=watch, name="gateway-addresses", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
