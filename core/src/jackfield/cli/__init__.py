"""The command line. A command imports what it needs when it is run.

Exit codes: 0 success; 1 a Jackfield error, printed on stderr (with ``--json``: as an object on stdout); 2 wrong usage;
130 interrupted by SIGINT.
"""

from __future__ import annotations

import os
from typing import Any

import click

from jackfield import __version__
from jackfield.cli.commands import LazyGroup, algorithms, checkpoint, env, plugins, replicas, report, run
from jackfield.cli.config_commands import config
from jackfield.errors import JackfieldError, RunError
from jackfield.imports import LOG_LEVEL, own_process

__all__ = ["main"]


class MainGroup(LazyGroup):
    """A click group that prints errors as text or JSON."""

    def invoke(self, ctx: click.Context) -> Any:
        if level := ctx.params["log_level"]:
            os.environ[LOG_LEVEL] = level  # for this process and those that it starts
        own_process()
        try:
            return super().invoke(ctx)
        except JackfieldError as error:
            report(ctx, error)
        except OSError as error:  # a file argument cannot be read or written
            if error.filename is None:
                raise
            found = RunError(f"a file cannot be used: {error}", code="run.storage", where=str(error.filename))
            report(ctx, found)
        except KeyboardInterrupt:  # the command does not handle the signal, or not yet
            click.echo("SIGINT: ending", err=True)
            ctx.exit(130)


_COMMANDS = [run, replicas, checkpoint, config, plugins, env, algorithms]


@click.group("jackfield", cls=MainGroup, commands=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jackfield")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Log messages of this level and above, also in workers; by default warnings.",
)
def main(log_level: str | None) -> None:
    """Reinforcement-learning post-training of language models, built from plugins."""


main.lazy = {
    "init": ("jackfield_configure.command", "Write a config file with comments."),
    "bench": ("jackfield_bench.command", "Evaluate checkpoints on sets of held-out tasks."),
    "serve": ("jackfield_serve.command", "Answer users with the replicas of a run."),
    "promote": ("jackfield_serve.command", "Let served replicas take over a run's model."),
    "queue": ("jackfield_queue.command", "Inspect, import, export and serve queues."),
    "rewards": ("jackfield_rewards.command", "Share, try, compute again and push rewards."),
    "trace": ("jackfield_trace.command", "Show a rollout: its turns, tokens, tool calls and rewards."),
    "gateway": ("jackfield_gateway.command", "Explore with programs that speak OpenAI's API."),
    "data": ("jackfield_datasets.command", "Look at sets of tasks: how they are read, what is trained on."),
    "parity": ("jackfield_parity.command", "Compare engines and servers with a float64 reference."),
    "plan": ("jackfield_simulation.command", "Predict step times, and the best settings of the schedule."),
}
_CONFORMANCE = "jackfield_conformance.commands"
config.lazy = {"schema": ("jackfield_configure.command", "Print the JSON Schema of config files, for editors.")}
plugins.lazy = {
    "doctor": (_CONFORMANCE, "Try plugins where they will run; print what to fix."),
    "check": (_CONFORMANCE, "Check that a plugin keeps its contract."),
    "new": (_CONFORMANCE, "Write a new plugin: a small one that works."),
}
