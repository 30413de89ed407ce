"""The suite of checkpoint engines: the invariants of ``jackfield.abc.checkpoint_engine``, on real transfers.

Both ends are in this process and on one event loop, so a transport between machines must work on loopback, too. A
plugin's fixture may have ``settings``, ``bucket_settings`` (a list of settings with tiny, small and large buckets, for
a plugin without a setting ``bucket_bytes``) and ``silence_seconds`` (the deadline if a peer is silent; default 0.5).
"""

from __future__ import annotations

from jackfield_conformance.registry import Capability

CAPABILITIES: dict[str, Capability] = {
    "delta": Capability(what="moves changed blocks to workers that hold the previous version"),
    "gpu": Capability(what="moves tensors of a GPU"),
    "retains_weights": Capability(what="keeps the newest weights for workers that start after a transfer"),
    "multi_host": Capability(what="works between machines"),
}
