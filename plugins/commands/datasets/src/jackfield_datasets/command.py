"""The command ``jackfield data``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from jackfield.cli.commands import json_option
from jackfield.cli.commands import show as print_result
from jackfield.config import RunConfig, apply_override, load_config
from jackfield.config.data import DataSet, sets_of
from jackfield.data.encoding import encode_answers, encode_prompt
from jackfield.data.formats import Task, TaskFormat
from jackfield.data.tasks import TaskSet
from jackfield.data.tokens import HuggingFaceChatTokenizer
from jackfield.settings import structure
from jackfield_datasets.lines import FIRST
from jackfield_datasets.sets import open_tasks

#: commands of other packages, by the module that has them
_ELSEWHERE = {
    **dict.fromkeys(("label", "run", "serve", "served", "sets", "trace"), "jackfield_pipelines.commands"),
    **dict.fromkeys(("plan", "statistics", "tighten", "clean"), "jackfield_data_plan.commands"),
    "format": "jackfield_formatter.command",
}
_MARKS = "⟦", "⟧"  #: around what is trained on, where there are no colours


class _Group(click.Group):
    """Has the commands of jackfield-pipelines, -data-plan and -formatter, too, where they are installed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted([*super().list_commands(ctx), *filter(_module_of, _ELSEWHERE)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; those of other packages are imported when they are used."""
        if module := _module_of(cmd_name):
            command: click.Command = getattr(import_module(module), cmd_name)
            return command
        return super().get_command(ctx, cmd_name)


def _module_of(name: str) -> str | None:
    """Return the module with a command of another package, if its package is installed."""
    module = _ELSEWHERE.get(name)
    return module if module and find_spec(module.partition(".")[0]) else None


@click.group(cls=_Group)
def data() -> None:
    """Look at sets of tasks."""


@data.command("show")
@click.argument("file")
@click.argument("overrides", nargs=-1)
@click.option("--model", type=click.Path(exists=True, file_okay=False), help="Folder of the model: show its tokens.")
@click.option("-n", "count", type=click.IntRange(min=1), default=3, show_default=True, help="How many tasks.")
@json_option
def show_tasks(file: str, overrides: tuple[str, ...], model: str | None, count: int, as_json: bool) -> None:
    """Print the first tasks of FILE as the model sees them, and mark what is trained on.

    FILE is a file, a folder of save_to_disk or a name on the Hub; or the YAML file of a run, whose training tasks are
    shown as its settings say. OVERRIDES are then settings of the run, else of `data`, such as split=test,
    format.answer_key=label or template_options.enable_thinking=false.
    """
    given, config = _given(file, overrides)
    form = TaskFormat() if config is None else config.data.format
    folder = model or (config.model.path if config is not None and Path(config.model.path).is_dir() else None)
    tokenizer = None if folder is None else _tokenizer(folder, config)
    found = list[dict[str, Any]]()
    for each in given:
        tasks = open_tasks([each], form, first=max(count, FIRST))
        found.append({"set": each.path, "notes": tasks.notes, "tasks": _rows(tasks, count, tokenizer)})
    if as_json:
        print_result(found)
        return
    marks = ("", "") if sys.stdout.isatty() else _MARKS
    for one in found:
        click.echo("\n".join(one["notes"] or [f"{one['set']}, read as data.format says"]))
        legend = click.style("trained on", fg="green") if marks == ("", "") else f"{_MARKS[0]}trained on{_MARKS[1]}"
        click.echo(legend)
        for row in one["tasks"]:
            click.echo(_text(row, marks))


def _given(file: str, overrides: Sequence[str]) -> tuple[list[DataSet], RunConfig | None]:
    if Path(file).suffix in (".yaml", ".yml"):
        whole = load_config(file, overrides)
        return sets_of(whole.data.train, "data.train"), whole
    values: dict[str, Any] = {}
    for override in overrides:
        values = apply_override(values, override)
    own = {name: values.pop(name) for name in ("split", "config", "format") if name in values}
    config = structure(RunConfig, {"model": {"path": ""}, "data": values}) if values else None
    return [structure(DataSet, {"path": file, **own})], config


def _tokenizer(folder: str, config: RunConfig | None) -> HuggingFaceChatTokenizer:
    template = None if config is None else config.data.chat_template
    trusted = config is not None and config.model.trust_remote_code
    made = HuggingFaceChatTokenizer.load(folder, chat_template=template, trust_remote_code=trusted)
    return made if config is None else made.with_template(config.data.tools, config.data.template_options)


def _rows(tasks: TaskSet, count: int, tokenizer: HuggingFaceChatTokenizer | None) -> list[dict[str, Any]]:
    found = []
    for task in tasks[:count]:
        row: dict[str, Any] = {"id": task.id, "place": task.place, "data_source": task.data_source}
        row["ground_truth"] = task.ground_truth
        found.append({**row, **(_messages(task) if tokenizer is None else _tokens(task, tokenizer))})
    return found


def _messages(task: Task) -> dict[str, Any]:
    """Return prompt and answers as texts with roles; of answers, the assistant's messages are trained on."""
    prompt = "\n".join(f"[{each['role']}] {_content(each)}" for each in task.messages)
    answers = []
    for one in (task.response, task.rejected):
        said = [{"role": "assistant", "content": one}] if isinstance(one, str) else one
        if said is not None:
            shown = [(f"[{each['role']}] {_content(each)}", each["role"] == "assistant") for each in said]
            answers.append([{"text": text, "trained": trained} for text, trained in shown])
    return {"prompt": prompt, "answers": answers}


def _content(message: Any) -> str:
    calls = [str(each.get("function", each)) for each in message.get("tool_calls") or ()]
    return " ".join([str(message.get("content") or ""), *calls]).strip()


def _tokens(task: Task, tokenizer: HuggingFaceChatTokenizer) -> dict[str, Any]:
    """Return prompt and answers as the template renders them, with their numbers of tokens."""
    prompt = encode_prompt(tokenizer, task, None)
    encoded = [] if task.response is None else encode_answers(tokenizer, task)
    answers = []
    for ids, mask in encoded:
        parts = [(trained, [one for one, _ in part]) for trained, part in groupby(zip(ids, mask, strict=True), _last)]
        answers.append(
            [
                {"text": tokenizer.decode(part, False), "trained": bool(trained), "tokens": len(part)}
                for trained, part in parts
            ]
        )
    return {"prompt": tokenizer.decode(prompt, False), "prompt_tokens": len(prompt), "answers": answers}


def _last(pair: tuple[int, int]) -> int:
    return pair[1]


def _text(row: dict[str, Any], marks: tuple[str, str]) -> str:
    head = f"--- {row['id']} ({row['place']})"
    head += f", {row['prompt_tokens']} tokens of prompt" if "prompt_tokens" in row else ""
    lines = [head, row["prompt"]]
    for name, parts in zip(("answer", "rejected answer"), row["answers"], strict=False):
        counted = sum(part.get("tokens", 0) for part in parts if part["trained"])
        lines.append(f"- {name}" + (f", {counted} tokens trained on" if counted else ""))
        lines.append(("" if "prompt_tokens" in row else "\n").join(_part(part, marks) for part in parts))
    if row["ground_truth"]:
        lines.append(f"- ground truth: {row['ground_truth']}")
    return "\n".join(lines)


def _part(part: dict[str, Any], marks: tuple[str, str]) -> str:
    if not part["trained"]:
        return str(part["text"])
    return f"{marks[0]}{part['text']}{marks[1]}" if marks[0] else click.style(part["text"], fg="green")
