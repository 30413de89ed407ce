"""The devices of processes, as other processes know them."""

from __future__ import annotations


def gpu_identity(device: str) -> str | None:
    """Return the name of a GPU that is the same in every process, or None if ``device`` is no GPU.

    A process sees only its own GPUs, so that ``cuda:0`` is another one in every process.
    """
    import torch

    if torch.device(device).type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
