"""Modes, and the runtimes and placements on which each works: ``docs/reference/modes.md`` is generated from this."""

from __future__ import annotations

import attrs

from jackfield.config.sections import RunConfig
from jackfield.trainer.role import RoleName

MODES = ("online", "offline", "train", "explore")
RUNTIMES = ("inline", "ray", "distributed")  #: distributed: roles in processes of their own
PLACEMENTS = ("shared", "separate")
ROLES = {"online": ("train", "explore", "reward"), "train": ("train", "reward"), "explore": ("explore", "reward")}


def why_not(mode: str, runtime: str, placement: str | None) -> tuple[str, str, str] | None:
    """Return setting, reason and what is expected instead where a combination does not work; None: it works."""
    if runtime == "distributed" and mode not in ROLES:
        return "mode", "one process trains on answers from the data: there are no roles", "online, train or explore"
    if placement == "shared" and mode == "explore":
        return "cluster.placement", "nothing is trained that could share devices with replicas", "separate"
    if placement == "shared" and (mode, runtime) == ("online", "distributed"):
        return "cluster.placement", "an explorer's process has devices of its own", "separate"
    return None


def check_mode(config: RunConfig, role: RoleName = "all") -> None:
    """Refuse a mode on a runtime or placement on which it does not work, and settings of another mode."""
    mode, data, placement, trains = config.mode, config.data, config.cluster.placement, config.mode == "train"
    if no := why_not(mode, config.cluster.name if role == "all" else "distributed", placement):
        raise config.refusal(*no)
    mixed = [name for name, each in attrs.asdict(config.mixing, recurse=False).items() if each is not None and trains]
    missing = trains and data.samples is None and config.queue.address is None
    for wrong, where, what, expected in (
        (role not in ("all", *ROLES.get(mode, ())), "mode", f"mode {mode} has no role {role}", "another role or mode"),
        (data.samples and not trains, "data.samples", "samples from elsewhere are trained on alone", "mode: train"),
        (data.epochs > 1 and not trains, "data.epochs", "it counts the uses of data.samples", "1, or mode: train"),
        (missing, "data.samples", "there are no samples", "a file or folder, or a filled queue's queue.address"),
        (mixed, f"mixing.{''.join(mixed[:1])}", "all samples are in data.samples, with data.epochs", "null"),
        (placement == "separate" and config.cluster.offload, "cluster.offload", "no side is ever idle", "false"),
    ):
        if wrong:
            raise config.refusal(where, what, expected)
