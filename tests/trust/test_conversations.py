"""Conversations as data: rendered by the chat template, answers masked, anything else refused with file and line.

The reference is ``apply_chat_template`` of the model's own tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jackfield_commands import CommandServer, Completed

pytestmark = pytest.mark.timeout(120)

#: Closes each answer with a token that the model generates and one that it does not.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant> {{ message['content'] }}<end>.\n"
    "{% else %}<user> {{ message['role'] | length }} {{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: Drops what an earlier turn said as soon as another follows.
FORGETFUL = TEMPLATE.replace(
    "{{ message['content'] }}<end>", "{% if loop.last %}{{ message['content'] }}{% endif %}<end>"
)

Message = dict[str, str]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content}


class Trials:
    """Runs ``jackfield run`` on records."""

    def __init__(self, folder: Path, made: Path, jackfield: CommandServer) -> None:
        from transformers import AutoTokenizer

        self.folder, self.made, self.jackfield = folder, made, jackfield
        self.tokenizer = AutoTokenizer.from_pretrained(made / "model")
        self.count = 0

    def run(
        self, records: Iterable[Any], form: dict[str, Any], *, chat_template: str = TEMPLATE, **sections: Any
    ) -> tuple[Completed, Path, Path]:
        """One step over all records; how it ended, the run's folder and the file of the records."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        tasks = folder / "tasks.jsonl"
        lines = [json.dumps(record) for record in records]
        tasks.write_text("\n".join(lines) + "\n")
        settings = {
            "folder": str(folder / "run"),
            "mode": "offline",
            "model": {"path": str(self.made / "model")},
            "data": {
                "train": str(tasks),
                "groups_per_batch": len(lines),
                "rollouts_per_group": 1,
                "chat_template": chat_template,
                "format": {"answer_key": None, **form},
            },
            "algorithm": {"name": "sft"},
            "schedule": {"steps": 1},
            "checkpoint": {"every": 1},
            "cluster": {"threads": 1},
            "observe": {"progress": False, "curve": False, "report_to": []},
        }
        for name, section in sections.items():
            settings[name] = {**settings.get(name, {}), **section} if isinstance(section, dict) else section
        (folder / "run.yaml").write_text(yaml.safe_dump(settings))
        return self.jackfield("run", str(folder / "run.yaml")), folder / "run", tasks

    def rows(self, *arguments: Any, **sections: Any) -> dict[int, list[dict[str, Any]]]:
        """Rows of the sample table by the line of their record, in the order of their keys."""
        ended, folder, _ = self.run(*arguments, **sections)
        assert 0 == ended.code, ended.error
        rows: dict[int, list[dict[str, Any]]] = {}
        table = [json.loads(line) for line in (folder / "samples" / "train.jsonl").read_text().splitlines()]
        for row in sorted(table, key=lambda row: row["key"]):
            rows.setdefault(int(row["tags"]["task"].partition(":")[2]), []).append(row)
        return rows

    def refused(self, code: str, *arguments: Any, line: int, **sections: Any) -> str:
        ended, folder, tasks = self.run(*arguments, **sections)
        assert 1 == ended.code, ended.out + ended.error
        assert ended.error.startswith(f"[{code}] "), ended.error
        assert f"{tasks}:{line}" in ended.error
        assert "Traceback" not in ended.error
        assert not folder.exists(), "refused before anything was written"
        return ended.error

    def tokens(self, messages: list[Message], *, asked: bool = False) -> list[int]:
        """The independent reference."""
        found = self.tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, add_generation_prompt=asked, tokenize=True, return_dict=False
        )
        return list(found)

    def same(self, row: dict[str, Any], prompt: list[Message], answer: list[Message]) -> None:
        """A row has the prompt's tokens, then the answer's, and its mask marks what the assistant says."""
        prompt_ids = self.tokens(prompt, asked=True)
        whole = self.tokens([*prompt, *answer])
        assert whole[: len(prompt_ids)] == prompt_ids
        assert whole[len(prompt_ids) :] == row["response_ids"]
        assert self.tokenizer.decode(prompt_ids) == row["prompt"]
        spoken = [message["content"] + "<end>" for message in answer if message["role"] == "assistant"]
        masked = [token for token, bit in zip(row["response_ids"], row["response_mask"], strict=True) if bit]
        assert self.tokenizer.encode(" ".join(spoken), add_special_tokens=False) == masked
        assert (len(prompt_ids), len(whole) - len(prompt_ids), len(masked)) == tuple(
            row["tags"][name] for name in ("prompt_tokens", "response_tokens", "model_tokens")
        )


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory, made: Path, jackfield: CommandServer) -> Trials:
    return Trials(tmp_path_factory.mktemp("conversations"), made, jackfield)


QUESTION = user("Tom has 5 apples and gets 3. How many apples now?")
AGAIN = user("Amy has 7 eggs and loses 2. How many eggs now?")
SYSTEM: Message = {"role": "system", "content": "How many?"}


def test_completions(trials: Trials) -> None:
    """``prompt`` and ``completion`` as lists of messages (TRL), with a system message, history and tools; and texts."""
    pairs: list[tuple[list[Message], list[Message]]] = [
        ([QUESTION], [assistant("5 + 3 8")]),
        ([SYSTEM, QUESTION], [assistant("8")]),
        ([QUESTION, assistant("8"), AGAIN], [assistant("7 - 2 5")]),
        ([QUESTION], [assistant("5 + 3"), tool("8"), assistant("8 apples")]),
        ([QUESTION], [assistant("8"), AGAIN, assistant("5")]),
    ]
    records: list[dict[str, Any]] = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    records.append({"prompt": QUESTION["content"], "completion": [assistant("8")]})
    records.append({"prompt": [QUESTION], "completion": "5 + 3 8"})
    rows = trials.rows(records, {"prompt_key": "prompt", "response_key": "completion"})
    for line, (prompt, completion) in enumerate(pairs, start=1):
        trials.same(rows[line][0], prompt, completion)
    trials.same(rows[6][0], [QUESTION], [assistant("8")])
    text = rows[7][0]  # a text ends with the token that ends a turn, and nothing behind it
    assert trials.tokenizer.encode("5 + 3 8<end>") == text["response_ids"]
    assert [1] * len(text["response_ids"]) == text["response_mask"]


def test_messages_that_end_with_the_assistant(trials: Trials) -> None:
    """Are a prompt and the assistant's last turn; a ground truth beside them is not what is taught."""
    cases: list[tuple[list[Message], list[Message]]] = [
        ([QUESTION], [assistant("8")]),
        ([SYSTEM, QUESTION, assistant("8"), AGAIN], [assistant("7 - 2"), tool("5"), assistant("5")]),
    ]
    records = [{"messages": [*prompt, *answer], "truth": 8} for prompt, answer in cases]
    rows = trials.rows(records, {"messages_key": "messages", "answer_key": "truth"})
    for line, (prompt, answer) in enumerate(cases, start=1):
        trials.same(rows[line][0], prompt, answer)


DPO = {"algorithm": {"name": "dpo"}}


def test_preferences(trials: Trials) -> None:
    """``chosen`` and ``rejected`` behind an explicit prompt: the better one is first."""
    record = {"prompt": [QUESTION], "chosen": [assistant("5 + 3 8")], "rejected": [assistant("5 - 3 2")]}
    form = {"prompt_key": "prompt", "response_key": "chosen", "rejected_key": "rejected"}
    [better, worse] = trials.rows([record], form, **DPO)[1]
    trials.same(better, [QUESTION], record["chosen"])
    trials.same(worse, [QUESTION], record["rejected"])


def test_implied_prompts(trials: Trials) -> None:
    """``chosen`` and ``rejected`` hold the whole conversation; what they share is the prompt."""
    prompt = [SYSTEM, QUESTION, assistant("8"), AGAIN]
    chosen, rejected = [assistant("7 - 2"), tool("5"), assistant("5")], [assistant("9")]
    record = {"chosen": [*prompt, *chosen], "rejected": [*prompt, *rejected]}
    form = {"prompt_key": None, "response_key": "chosen", "rejected_key": "rejected"}
    [better, worse] = trials.rows([record], form, **DPO)[1]
    trials.same(better, prompt, chosen)
    trials.same(worse, prompt, rejected)


def test_reinforcement_learning_on_prompts_that_are_conversations(trials: Trials) -> None:
    """A list of messages is a prompt without further settings, and an answer at its end is not shown to the model."""
    records: list[dict[str, Any]] = [
        {"prompt": [SYSTEM, QUESTION], "truth": "8"},
        {"prompt": [QUESTION, assistant("8")], "truth": "8"},
    ]
    form = {"prompt_key": "prompt", "answer_key": "truth"}
    rows = trials.rows(
        records,
        form,
        mode="online",
        algorithm={"name": "grpo", "advantages": {"name": "reinforce"}},  # one rollout has nothing to compare with
        sampling={"max_new_tokens": 4},
        reward={"name": "rules", "pattern": None, "ground_truth_pattern": None},
    )
    for line, prompt in ((1, [SYSTEM, QUESTION]), (2, [QUESTION])):
        assert trials.tokenizer.decode(trials.tokens(prompt, asked=True)) == rows[line][0]["prompt"]


SFT_FORM = {"prompt_key": "prompt", "response_key": "completion"}
DPO_FORM = {"prompt_key": "prompt", "response_key": "chosen", "rejected_key": "rejected"}
IMPLIED = {**DPO_FORM, "prompt_key": None}


@pytest.mark.parametrize(
    ("form", "wrong"),
    [
        (SFT_FORM, {"prompt": [QUESTION], "completion": assistant("8")}),
        (SFT_FORM, {"prompt": [QUESTION], "completion": None}),
        (SFT_FORM, {"prompt": [QUESTION], "completion": []}),
        (SFT_FORM, {"prompt": [QUESTION], "completion": ["8"]}),
        (SFT_FORM, {"prompt": [QUESTION], "completion": [{"role": "assistant"}]}),
        (SFT_FORM, {"prompt": [QUESTION], "completion": [QUESTION, assistant("8")]}),
        (SFT_FORM, {"prompt": [QUESTION], "completion": [assistant("8"), tool("8")]}),
        (SFT_FORM, {"prompt": [QUESTION, assistant("8")], "completion": [assistant("8")]}),
        (SFT_FORM, {"prompt": [{"role": "user"}], "completion": "8"}),
        ({"messages_key": "messages"}, {"messages": [QUESTION]}),
        ({"messages_key": "messages"}, {"messages": [QUESTION, assistant("8"), tool("8")]}),
        ({"messages_key": "messages"}, {"messages": [assistant("8")]}),
        ({"prompt_key": "prompt", "answer_key": "truth"}, {"prompt": "How many?", "truth": {"value": 8}}),
        (DPO_FORM, {"prompt": [QUESTION], "chosen": [assistant("8")], "rejected": {"content": "9"}}),
        (DPO_FORM, {"prompt": [QUESTION], "chosen": [QUESTION, assistant("8")], "rejected": [assistant("9")]}),
        (IMPLIED, {"chosen": [QUESTION, assistant("8")], "rejected": [AGAIN, assistant("9")]}),
        (IMPLIED, {"chosen": [QUESTION, assistant("8")], "rejected": [QUESTION, assistant("8")]}),
        (IMPLIED, {"chosen": "How many? 8", "rejected": "How many? 9"}),
        (IMPLIED, {"chosen": [QUESTION, assistant("8")], "rejected": [QUESTION, AGAIN]}),
    ],
)
def test_what_is_no_answer_is_refused(trials: Trials, form: dict[str, Any], wrong: dict[str, Any]) -> None:
    """With file and line, before anything is written."""
    first: dict[str, Any] = {
        "prompt": "How many?",
        "completion": "8",
        "truth": "8",
        "messages": [QUESTION, assistant("8")],
    }
    first |= {"chosen": [assistant("8")], "rejected": [assistant("9")]}
    if form is IMPLIED:
        first |= {name: [QUESTION, *first[name]] for name in ("chosen", "rejected")}
    sections = DPO if "rejected_key" in form else {}
    trials.refused("data.malformed", [first, wrong], form, line=2, **sections)


@pytest.mark.parametrize(
    ("template", "code"),
    [
        (FORGETFUL, "data.malformed"),
        (TEMPLATE.replace("<assistant>{% endif %}", "<assistant> How{% endif %}"), "data.not-append-only"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(trials: Trials, template: str, code: str) -> None:
    """It leaves out an earlier answer, or its prompt is not the beginning of the whole: nothing is trained on."""
    records = [{"prompt": [QUESTION], "completion": [assistant("5 + 3"), tool("8"), assistant("8 apples")]}]
    trials.refused(code, records, SFT_FORM, line=1, chat_template=template)


def test_messages_that_a_table_stores_as_texts(trials: Trials) -> None:
    """As JSON, and in Python's notation, which pandas writes into CSV; what is no list of messages stays a text."""
    prompt, answer = [SYSTEM, QUESTION], [assistant("5 + 3 8")]
    texts = ['[{"name": "Tom", "apples": 8}]', "[8]", '{"role": "assistant", "content": "8"}', '[{"role": "assistant"']
    texts.append('[{"role": "wizard", "content": "8"}]')
    records = [
        {"prompt": json.dumps(prompt), "completion": json.dumps(answer, indent=1)},
        {"prompt": repr(prompt), "completion": repr(answer)},
        *({"prompt": QUESTION["content"], "completion": text} for text in texts),
    ]
    rows = trials.rows(records, {"prompt_key": "prompt", "response_key": "completion"})
    for line in (1, 2):
        trials.same(rows[line][0], prompt, answer)
    for line, text in enumerate(texts, start=3):
        assert trials.tokenizer.encode(f"{text}<end>") == rows[line][0]["response_ids"]


def test_preferences_that_a_table_stores_as_texts(trials: Trials) -> None:
    record = {"chosen": [QUESTION, assistant("5 + 3 8")], "rejected": [QUESTION, assistant("2")]}
    form = {"prompt_key": None, "response_key": "chosen", "rejected_key": "rejected"}
    [better, worse] = trials.rows([{key: json.dumps(value) for key, value in record.items()}], form, **DPO)[1]
    trials.same(better, [QUESTION], record["chosen"][1:])
    trials.same(worse, [QUESTION], record["rejected"][1:])


@pytest.mark.parametrize("rejected", ["8", [assistant("8")]])
def test_a_preference_for_the_same_answer_is_refused(trials: Trials, rejected: Any) -> None:
    records = [{"prompt": "How many?", "chosen": "8", "rejected": "2"}]
    records.append({"prompt": "How many?", "chosen": "8", "rejected": rejected})
    form = {"prompt_key": "prompt", "response_key": "chosen", "rejected_key": "rejected"}
    trials.refused("data.malformed", records, form, line=2, **DPO)
