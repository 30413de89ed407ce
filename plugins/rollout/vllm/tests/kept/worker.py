"""Runs in vLLM's workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from jackfield_rollout_vllm.worker import WorkerExtension

_STEP_SECONDS = 0.01


class KeptExtension(WorkerExtension):
    """The plugin's, and a way back to the first weights."""

    def kept_reload(self) -> None:
        """Load the folder's weights again; not those of experts, which vLLM packs on a CPU, and no check updates."""
        worker: Any = self
        model, folder = self.model_runner.get_model(), Path(worker.model_config.model)
        self._slow_down(worker)
        if worker.model_config.is_moe:
            return
        for file in folder.glob("*.safetensors"):
            model.load_weights(load_file(file).items())

    def _slow_down(self, worker: Any) -> None:
        """Have a step take as long as a small model's: checks stop requests midway, from two processes away."""
        runner = worker.model_runner
        if not hasattr(runner, "kept_execute"):
            runner.kept_execute = runner.execute_model
            runner.execute_model = self._slowly

    def _slowly(self, *arguments: Any, **keywords: Any) -> Any:
        time.sleep(_STEP_SECONDS)
        return self.model_runner.kept_execute(*arguments, **keywords)
