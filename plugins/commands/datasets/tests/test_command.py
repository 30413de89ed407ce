"""`jackfield data show`: tasks as the model sees them, with what is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jackfield.cli import main
from jackfield.errors import DataError

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} "
    "{% if m['role'] == 'assistant' and enable_thinking is defined %}off {% endif %}{{ m['content'] }}</s>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% if enable_thinking is defined %}off {% endif %}{% endif %}"
)
RECORDS = [
    {"prompt": [{"role": "user", "content": "what"}], "completion": [{"role": "assistant", "content": f"a{n}"}]}
    for n in range(5)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of words."""
    names = ["<s>", "</s>", "<unk>", "system", "user", "assistant", "what", "off", *(f"a{n}" for n in range(5))]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: n for n, name in enumerate(names)}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder := tmp_path_factory.mktemp("model"))
    return folder


@pytest.fixture
def file(tmp_path: Path, write: Any) -> Path:
    made: Path = write(RECORDS, tmp_path / "train.parquet")
    return made


def show(*words: object) -> Result:
    return CliRunner().invoke(main, ["data", "show", *map(str, words)])


def test_texts_without_a_model(file: Path) -> None:
    found = show(file, "-n", 2)
    assert 0 == found.exit_code, found.output
    lines = found.stdout.splitlines()
    assert lines[0].endswith("has TRL's prompts and completions (prompt: prompt, answer: completion)")
    assert ["[user] what", "- answer", "⟦[assistant] a0⟧"] == lines[3:6]
    assert 2 == found.stdout.count("---")


def test_tokens_with_a_model(file: Path, model: Path) -> None:
    found = show(file, "--model", model, "-n", 1)
    assert "<s> user what </s> <s> assistant\n- answer, 2 tokens trained on\n⟦a0 </s>⟧" in found.stdout
    thinks = show(file, "template_options.enable_thinking=false", "--model", model, "-n", 1)
    assert "<s> assistant off\n" in thinks.stdout
    (shown,) = json.loads(show(file, "--model", model, "--json").stdout)
    assert 3 == len(shown["tasks"])
    assert [{"text": "a0 </s>", "trained": True, "tokens": 2}] == shown["tasks"][0]["answers"][0]


def test_the_tasks_of_a_run(file: Path, model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {{path: {model}}}\ndata:\n  train: {file}\n"
        "  format: {prompt_key: prompt, response_key: completion, answer_key: null, system: what}\n"
    )
    assert "system" not in show(run, "data.format.system=null").stdout
    assert "<s> system what </s> <s> user what </s>" in show(run).stdout


def test_other_settings_and_errors(file: Path, tmp_path: Path) -> None:
    found = show(file, "format.prompt_key=prompt", "format.answer_key=null", "format.response_key=null", "-n", 1)
    assert "answer" not in found.stdout.partition("---")[2]
    wrong = show(file, "format.promt_key=x")
    assert (1, True) == (wrong.exit_code, "prompt_key" in wrong.stderr)
    missing = show(tmp_path / "no.parquet")
    assert (1, True) == (missing.exit_code, DataError.default_code.split(".")[0] in missing.stderr)


def test_commands_of_packages_that_are_not_installed_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield_datasets.command.find_spec", lambda name: None)
    helped = CliRunner().invoke(main, ["data", "--help"])
    assert (0, True, False) == (helped.exit_code, "show" in helped.stdout, "tighten" in helped.stdout)
    assert 2 == CliRunner().invoke(main, ["data", "tighten"]).exit_code
