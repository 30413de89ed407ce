"""One rollout server: ``python server.py PLAN.json``.

It runs in the server's own interpreter and imports no module of this package. It generates a response to each prompt of
the plan's batch and writes tokens and log-probs into ``generated.safetensors`` and its facts into ``server.json``.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import GenerateRequest, GenerateResult, RolloutContext, SamplingParams
from jackfield.errors import error_fields
from jackfield.plugins import discover
from jackfield.settings import structure


async def play(plan: dict[str, Any]) -> dict[str, Any]:
    """Start the server, generate all responses at once and stop it."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = Path(plan["folder"])
    stage = folder / "server.stage"
    tensors = load_file(plan["batch"])
    lengths = {name: tensors[f"{name}_lengths"].tolist() for name in ("prompt", "response")}
    prompts = tensors["prompt_ids"].split(lengths["prompt"])
    context = RolloutContext(
        model=structure(ModelSpec, plan["model"], "model"), device=plan["device"], seed=plan["seed"]
    )
    stage.write_text("loading the plugin", encoding="utf-8")
    server = discover().load("rollout", plan["name"]).build(plan["settings"], context)
    try:
        stage.write_text("start", encoding="utf-8")
        await server.start()
        stage.write_text("generate", encoding="utf-8")
        requests = [
            GenerateRequest(
                request_id=f"row-{row}",
                prompt_ids=tuple(prompt.tolist()),
                sampling=SamplingParams(
                    max_new_tokens=max(size, 1), temperature=plan["temperature"], seed=row, ignore_eos=True
                ),
            )
            for row, (prompt, size) in enumerate(zip(prompts, lengths["response"], strict=True))
        ]
        results: list[GenerateResult] = await asyncio.gather(*map(server.generate, requests))
    finally:
        stage.write_text("stop", encoding="utf-8")
        await server.stop()
    ids = torch.tensor([token for result in results for token in result.token_ids], dtype=torch.int64)
    found = torch.tensor([value for result in results for value in result.log_probs], dtype=torch.float32)
    sizes = torch.tensor([len(result.token_ids) for result in results], dtype=torch.int64)
    tensors = {"response_ids": ids, "log_probs": found, "response_lengths": sizes}
    save_file(tensors, folder / "generated.safetensors")
    return {"tokens": len(ids)}


def main(file: str) -> None:
    """Run the server; its error, if there is one, is in ``server.json``."""
    plan, code = json.loads(Path(file).read_text(encoding="utf-8")), 0
    if plan["preload"] is not None:
        runpy.run_path(plan["preload"])
    if plan["threads"] is not None:
        import torch

        torch.set_num_threads(plan["threads"])
    try:
        facts = asyncio.run(play(plan))
    except Exception as error:
        import traceback

        traceback.print_exc()
        facts, code = {"error": error_fields(error)}, 1
    (Path(plan["folder"]) / "server.json").write_text(json.dumps(facts), encoding="utf-8")
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
