"""The suite of checkpoint engines: the invariants of ``jackfield.abc.checkpoint_engine``, on running transfers.

Both sides are made in this process and run on one event loop; a transport between machines has to work on loopback,
too. A plugin's fixture may hold ``settings``, ``bucket_settings`` (a list of settings under which buckets are tiny,
small and large; not needed by a plugin with a setting ``bucket_bytes``) and ``silence_seconds`` (how long the deadline
is where a peer is silent, default 0.5).
"""

from __future__ import annotations

from jackfield_conformance.registry import Capability
from jackfield_conformance.suites.checkpoint_engine import topology, transfers

__all__ = ["CAPABILITIES", "topology", "transfers"]

CAPABILITIES: dict[str, Capability] = {
    "delta": Capability(what="moves changed blocks to workers that hold the version before"),
    "gpu": Capability(what="moves tensors of a GPU"),
    "retains_weights": Capability(what="keeps the newest weights for workers that come when a transfer is over"),
    "multi_host": Capability(what="works between machines"),
}
