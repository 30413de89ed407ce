"""An update's weights, received into a folder that an engine then reads."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import attrs

from jackfield.abc.rollout import RolloutContext, UpdateWeightsRequest
from jackfield.errors import WeightsError
from jackfield.sdk.receiver import open_receiver
from jackfield.weights.staging import stage_adapter, stage_weights, tensors_of

__all__ = ["Staged", "StagingArea"]


@attrs.frozen
class Staged:
    """Weights in a folder."""

    folder: Path
    digests: dict[str, str]  #: of what was received, by name

    def remove(self) -> None:
        """The engine has read them."""
        shutil.rmtree(self.folder, ignore_errors=True)


class StagingArea:
    """Receives updates for one replica, whose engine is one receiver however many workers it has."""

    def __init__(self, context: RolloutContext, where: str) -> None:
        """
        Args:
            context: of the replica; its model's folder says which tensors there are.
            where: an existing folder.

        Raises:
            WeightsError: ``weights.storage``: the model's folder has no safetensors files.
        """
        self._context = context
        self._where = where
        self._model = Path(context.model.path)
        self.expected: Mapping[str, tuple[int, ...]] = tensors_of(self._model)
        described = json.loads((self._model / "config.json").read_text(encoding="utf-8"))
        self._tied = bool({**described, **(described.get("text_config") or {})}.get("tie_word_embeddings"))

    async def receive(self, request: UpdateWeightsRequest) -> Staged:
        """Receive a version, whole or not at all.

        Raises:
            WeightsError: ``weights.transfer``, ``weights.missing``, ``weights.storage``.
        """
        if len(request.connect) != 1:
            raise WeightsError(
                "connect arguments do not fit the replica's workers", expected=1, found=len(request.connect)
            )
        if not Path(self._where).is_dir():
            raise WeightsError(
                "there is no folder for new weights",
                code="weights.storage",
                where="rollout.staging",
                expected="an existing folder",
                found=self._where,
            )
        folder = Path(tempfile.mkdtemp(prefix=f"jackfield-weights-{request.version}-", dir=self._where))
        try:
            return Staged(folder, await self._write(request, folder))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def _write(self, request: UpdateWeightsRequest, folder: Path) -> dict[str, str]:
        engine = open_receiver(request, host=self._context.host)
        arguments = request.connect[0]
        if request.kind == "adapter":
            return await stage_adapter(engine, arguments, request.version, dict(request.peft_config or {}), folder)
        shutil.copy(self._model / "config.json", folder)
        return await stage_weights(engine, arguments, request.version, self.expected, folder, tied=self._tied)
