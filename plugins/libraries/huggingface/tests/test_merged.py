"""An adapter is merged into its base model once, and gives the adapter's own log-probs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jackfield_chat_model import save_chat_model
from jackfield_huggingface.merged import merged_folder, name_origin
from jackfield_testing import refused

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of merged models."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    return tmp_path / "jackfield" / "merged"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    save_chat_model(str(folder))
    return folder


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """An adapter whose every factor is random."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits


def test_the_merged_model_is_the_adapter_on_its_base(base: Path, adapter: Path, cache: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = merged_folder(str(adapter))
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits(plain).clone()
    expected = logits(PeftModel.from_pretrained(plain, adapter))
    assert (expected - before).abs().max() > 0.01, "the adapter changes something"
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(found)), expected, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(found).chat_template == AutoTokenizer.from_pretrained(base).chat_template
    assert [Path(found)] == list(cache.iterdir()), "nothing else is left"


def test_it_is_made_again_only_for_another_adapter_or_base(base: Path, adapter: Path, cache: Path) -> None:
    first = merged_folder(str(adapter))
    for name in ("config.json", "tokenizer.json"):
        (base / name).touch()
    made = Path(first, "model.safetensors").stat().st_mtime_ns
    assert first == merged_folder(str(adapter))
    assert made == Path(first, "model.safetensors").stat().st_mtime_ns
    described = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**described, "lora_alpha": 2 * described["lora_alpha"]}))
    assert first != merged_folder(str(adapter))
    assert 2 == len(list(cache.iterdir()))


def test_it_is_made_again_for_another_chat_template(base: Path, adapter: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    found = []
    for template in ("first", "second"):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(adapter)
        found.append(merged_folder(str(adapter)))
        assert template == AutoTokenizer.from_pretrained(found[-1]).chat_template
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"base_model_name_or_path": "/no/such/folder"}, "/no/such/folder"),
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({"target_modules": ["no_such_layer"]}, "no_such_layer"),
        ({"r": "four"}, "TypeError"),
        ({"target_modules": ["q_proj"]}, "belong to no layer of target_modules"),
        (None, "adapter_model.safetensors"),
    ],
    ids=["base", "task", "layers", "rank", "few", "weights"],
)
def test_an_adapter_that_cannot_be_merged_is_refused(
    adapter: Path, tmp_path: Path, cache: Path, change: dict[str, Any] | None, named: str
) -> None:
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    if change is None:
        (other / "adapter_model.safetensors").unlink()
    else:
        described = json.loads((other / "adapter_config.json").read_text())
        (other / "adapter_config.json").write_text(json.dumps({**described, **change}))
    with refused("engine.model", named, "fix"):
        merged_folder(str(other))
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize(
    ("weights", "named"),
    [(lambda found: {}, "missing adapter keys"), (lambda found: dict(list(found.items())[2:]), "missing adapter keys")],
    ids=["none", "some"],
)
def test_an_adapter_without_all_weights_is_refused(adapter: Path, cache: Path, weights: Any, named: str) -> None:
    """The base model as it is, or half an adapter, is not what was asked for."""
    from safetensors.torch import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    save_file(weights(load_file(file)), file)
    with refused("engine.model", named, "fix"):
        merged_folder(str(adapter))
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("adapter_config.json", "[]", "base_model_name_or_path"),
        ("adapter_config.json", "[" * 100_000, "base_model_name_or_path"),
        ("adapter_model.safetensors", "abc", "SafetensorError"),
    ],
    ids=["list", "deep", "weights"],
)
def test_a_damaged_file_is_refused(adapter: Path, name: str, content: str, named: str) -> None:
    (adapter / name).write_text(content)
    with refused("engine.model", named, "fix"):
        merged_folder(str(adapter))


def trained_on(folder: Path, out: Path, **settings: Any) -> Any:
    """Save a random adapter of a model's folder, and return the logits of the model with it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    given: Any = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    config = LoraConfig(init_lora_weights=False, **{**given, **settings})
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    made.save_pretrained(out)
    return logits(made)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"layers.0.self_attn.q_proj": 5}, "alpha_pattern": {"up_proj": 7}},
        {"target_modules": "all-linear"},
    ],
)
def test_an_adapter_trained_on_a_merged_one_is_one_of_the_whole_model(
    base: Path, adapter: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """peft loads it on the base that the user's adapter names, and finds both adapters in it."""
    from peft import AutoPeftModelForCausalLM

    expected = trained_on(Path(merged_folder(str(adapter))), tmp_path / "new", **settings)
    rows = name_origin(tmp_path / "new", merged_folder(str(adapter)))
    assert {"base model": str(base), "adapter that was merged into it before": str(adapter)} == rows
    text = (tmp_path / "new" / "adapter_config.json").read_text()
    assert str(base) == json.loads(text)["base_model_name_or_path"]
    assert str(tmp_path / "jackfield") not in text
    found = logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "new"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_that_cannot_be_joined_names_the_one_before(base: Path, adapter: Path, tmp_path: Path) -> None:
    """A run that is given it merges one after the other; the whole model has the names alone."""
    from transformers import AutoModelForCausalLM

    merged = merged_folder(str(adapter))
    expected = trained_on(Path(merged), tmp_path / "new", use_dora=True)
    rows = name_origin(tmp_path / "new", merged)
    assert (str(adapter), str(base)) == (rows["base model"], rows["which is an adapter of"])
    described = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert str(adapter) == described["base_model_name_or_path"]
    found = AutoModelForCausalLM.from_pretrained(merged_folder(str(tmp_path / "new")))
    torch.testing.assert_close(logits(found), expected, rtol=1e-4, atol=1e-5)
    (tmp_path / "whole").mkdir()
    names = {"base model": str(base), "adapter that was merged into it before": str(adapter)}
    assert names == name_origin(tmp_path / "whole", merged)


def test_a_changed_adapter_is_not_joined(adapter: Path, tmp_path: Path) -> None:
    """What was merged is there no more: the new adapter names it, and stays what it is."""
    merged = merged_folder(str(adapter))
    trained_on(Path(merged), tmp_path / "new")
    weights = (tmp_path / "new" / "adapter_model.safetensors").read_bytes()
    described = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**described, "lora_alpha": 2 * described["lora_alpha"]}))
    assert str(adapter) == name_origin(tmp_path / "new", merged)["base model"]
    assert weights == (tmp_path / "new" / "adapter_model.safetensors").read_bytes()


def test_an_adapter_of_itself_is_refused(adapter: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    described = json.loads((other / "adapter_config.json").read_text())
    for mine, base in ((other, adapter), (adapter, other)):
        (mine / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": str(base)}))
    with refused("engine.model", "once more", "fix"):
        merged_folder(str(other))
