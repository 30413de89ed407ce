"""The plugins of the documentation, installed for one test session, and a tiny model with a tokenizer."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jackfield.plugins import Registry, discover, installed

REPOSITORY = Path(__file__).parents[2]
PLUGINS = REPOSITORY / "examples" / "plugins_from_docs"
PROJECTS = sorted(file.parent for file in PLUGINS.glob("*/pyproject.toml"))


def _install(project: Path, site: Path) -> None:
    """What an installer leaves of an editable install: metadata with the entry points of the project's own file."""
    settings = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"{settings['name'].replace('-', '_')}-{settings['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {settings['name']}\nVersion: {settings['version']}\n", encoding="utf-8"
    )
    lines = []
    for group, entries in settings["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """The process's registry, which finds the documentation's plugins beside all that is installed."""
    site = tmp_path_factory.mktemp("site")
    for project in PROJECTS:
        _install(project, site)
    folders = [str(site), *(str(project / "src") for project in PROJECTS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*folders, *sys.path])
        patch.setenv("PYTHONPATH", os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])]))
        installed.cache_clear()
        yield discover()
    installed.cache_clear()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers that knows nothing, and a tokenizer whose words are ``w5`` … ``w60``."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    special = ("<pad>", "<end>", "<unknown>", "<user>", "<assistant>")
    words = Tokenizer(
        models.WordLevel({**{w: i for i, w in enumerate(special)}, **{f"w{i}": i for i in range(5, 61)}}, "<unknown>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<user> {{ m['content'] }} "
        "{% else %}<assistant> {{ m['content'] }} <end> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=61,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=64,
                tie_word_embeddings=True,
                initializer_range=0.25,
                bos_token_id=None,
                eos_token_id=1,
                pad_token_id=0,
            )
        ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four questions in GSM8K's form."""
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    lines = [f'{{"question": "w{n} w{n + 1}", "answer": "w{n + 2}"}}' for n in range(10, 14)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The machine is shared."""
    import torch

    torch.set_num_threads(1)


Build = Callable[..., Any]


@pytest.fixture
def build(documented: Registry) -> Build:
    """``build(kind, name, context, **settings)``: a plugin's object, through its gates."""

    def make(kind: str, name: str, context: Any, **settings: Any) -> Any:
        return documented.load(kind, name).build(settings, context)

    return make
