"""One side of ``vs_trl.py`` in a process of its own: ``python _vs_trl_sides.py SETTINGS.json RESULT.json``.

Both sides write a line per step (the time, CPU seconds of the process and its children, the mean reward of the step's
samples) and the seconds that each stage took over all steps but the first.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import psutil
from _vs_trl_task import compute_score

TASK = Path(__file__).with_name("_vs_trl_task.py")


@attrs.frozen(kw_only=True)
class Settings:
    """What is measured; the same for both sides."""

    side: str  #: ``trl`` or ``jackfield``
    task: str  #: folder of the model and the prompts
    folder: str  #: where the side may write
    seed: int
    steps: int
    threads: int
    sync_offset: int = 0  #: of Jackfield
    extra_threads: int = 0  #: of Jackfield's engine
    prompts: int = 32
    completions: int = 8
    tokens: int = 32
    learning_rate: float = 1e-3
    overrides: dict[str, Any] = attrs.field(factory=dict)  #: of the side's own configuration


def trl_settings(settings: Settings) -> dict[str, Any]:
    """Keywords of TRL's ``GRPOConfig``: the work, and what makes TRL fastest at it on a CPU."""
    samples = settings.prompts * settings.completions
    work = {
        "max_steps": settings.steps,
        "seed": settings.seed,
        "num_generations": settings.completions,
        "max_completion_length": settings.tokens,
        "generation_kwargs": {"eos_token_id": None},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "beta": 0.0,
        "scale_rewards": "group",
        "num_iterations": 1,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": False,
        "use_cpu": True,
    }
    speed = {
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "use_transformers_continuous_batching": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return {**work, **speed, "output_dir": settings.folder, **settings.overrides}


def jackfield_config(settings: Settings) -> dict[str, Any]:
    """Jackfield's configuration: the same work, the fastest micro-batch, nothing that draws or traces."""
    return {
        "name": "vs_trl",
        "folder": settings.folder,
        "seed": settings.seed,
        "model": {"path": f"{settings.task}/model"},
        "data": {
            "train": f"{settings.task}/prompts.jsonl",
            "groups_per_batch": settings.prompts,
            "rollouts_per_group": settings.completions,
        },
        "sampling": {"temperature": 1.0, "max_new_tokens": settings.tokens, "ignore_eos": True},
        "algorithm": {
            "name": "grpo",
            "advantages": {"name": "grpo", "options": {"eps": 1e-4}},
            "loss": {"name": "ppo", "options": {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": None}},
        },
        "optimizer": {"lr": settings.learning_rate, "weight_decay": 0.0, "clip_grad": 1.0},
        "schedule": {"steps": settings.steps, "sync_offset": settings.sync_offset},
        "engine": {"name": "fsdp", "extra_threads": settings.extra_threads},
        "cluster": {"threads": settings.threads, "micro_batch_tokens": 4096},
        "checkpoint": {"every": 0, "at_end": False, "resume": False},
        "reward": {"name": "function", "path": f"{TASK}:compute_score"},
        "observe": {"report_to": [], **dict.fromkeys(("sample_table", "timeline", "curve", "progress"), False)},
        **settings.overrides,
    }


class Recorder:
    """Lines of steps, and seconds of stages."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.steps: list[dict[str, float]] = []
        self.stages: dict[str, float] = {}

    def stage(self, name: str, seconds: float) -> None:
        """A part of a step has ended."""
        self.stages[name] = self.stages.get(name, 0.0) + seconds

    def step(self, reward: float) -> None:
        """A step has ended."""
        times = [self._process.cpu_times(), *(child.cpu_times() for child in self._process.children(recursive=True))]
        cpu = sum(each.user + each.system for each in times)
        self.steps.append({"seconds": time.perf_counter(), "cpu_seconds": cpu, "reward": reward})
        if len(self.steps) == 1:
            self.stages = {}

    def shares(self) -> dict[str, float]:
        """Seconds of the stages, of the whole, and of what is in no stage."""
        whole = self.steps[-1]["seconds"] - self.steps[0]["seconds"]
        return {**self.stages, "other": whole - sum(self.stages.values()), "step": whole}

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, measured as a stage."""

        def measured(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.stage(name, time.perf_counter() - start)

        return measured


def run_trl(settings: Settings, recorder: Recorder) -> dict[str, Any]:
    """Train with TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings.threads)
    folder = f"{settings.task}/model"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with open(f"{settings.task}/prompts.jsonl", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": record["question"]}], tokenize=False, add_generation_prompt=True
        )
        for record in records
    ]
    rewards: list[float] = []

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        scores = [compute_score("", text, truth, {}) for text, truth in zip(completions, answer, strict=True)]
        rewards[:] = scores
        return scores

    class Steps(TrainerCallback):  # type: ignore[misc, unused-ignore]
        start = 0.0

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            recorder.stage("optimizer", time.perf_counter() - self.start)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.step(sum(rewards) / len(rewards))

    keywords = trl_settings(settings)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True),
        reward_funcs=reward,
        args=GRPOConfig(**keywords),
        train_dataset=Dataset.from_dict({"prompt": rendered, "answer": [record["answer"] for record in records]}),
        processing_class=tokenizer,
        callbacks=[Steps()],
    )
    trainer.eos_token_ids = []  # the end token is a token like any other: nothing behind it is masked
    trainer._generate_single_turn = recorder.timed(trainer._generate_single_turn, "generate")
    trainer._calculate_rewards = recorder.timed(trainer._calculate_rewards, "reward")
    trainer.compute_loss = recorder.timed(trainer.compute_loss, "forward")
    trainer.accelerator.backward = recorder.timed(trainer.accelerator.backward, "backward")
    trainer.train()
    return keywords


def run_jackfield(settings: Settings, recorder: Recorder) -> dict[str, Any]:
    """Train with Jackfield, runtime inline."""
    from jackfield.compose import run
    from jackfield.config import make_config
    from jackfield.plugins import hookimpl
    from jackfield.plugins.hooks import StageEnded, StepEnded

    class Steps:
        @hookimpl  # type: ignore[untyped-decorator, unused-ignore]
        def stage_ended(self, event: StageEnded) -> None:
            seconds = event.end - event.start
            if event.name == "next_batch":  # for generation, then for what is left of the rewards
                recorder.stage("reward and queue", seconds)
            elif event.name == "rollout":
                recorder.stage("generate", seconds)
                recorder.stage("reward and queue", -seconds)
            elif event.name != "reward":  # whose groups overlap each other and generation
                recorder.stage(event.name, seconds)

        @hookimpl  # type: ignore[untyped-decorator, unused-ignore]
        def step_ended(self, event: StepEnded) -> None:
            recorder.step(event.metrics["reward/mean"])

    config = jackfield_config(settings)
    run(make_config(config), hooks=[Steps()])
    return config


def main() -> None:
    """Read settings, run, write the result."""
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    recorder = Recorder()
    config = {"trl": run_trl, "jackfield": run_jackfield}[settings.side](settings, recorder)
    Path(sys.argv[2]).write_text(
        json.dumps({"config": config, "steps": recorder.steps, "stages": recorder.shares()}), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
