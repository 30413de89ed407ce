"""The ABI: the base class of each plugin kind, with its request and result types.

There is one module per kind. Overridable methods take one frozen request and return one result, so that defaulted
fields can be added later. Versions are per kind: a new method with a default body or a new defaulted field raises the
minor version; a change that breaks an existing implementation raises the major version. ``core/abi/`` holds the
committed snapshots, which name every public class. Importing this package imports neither torch nor ray.
"""

from __future__ import annotations

from jackfield.abc.agent import AgentLoopBase
from jackfield.abc.checkpoint_engine import CheckpointEngine
from jackfield.abc.engine import BaseEngine
from jackfield.abc.operator import Operator
from jackfield.abc.reward import RewardAgent
from jackfield.abc.rollout import BaseRolloutServer
from jackfield.abc.transfer_queue import TransferQueueBackend

__all__ = [
    "ABI_VERSIONS",
    "CONTRACTS",
    "KINDS",
    "SECTIONS",
    "AgentLoopBase",
    "BaseEngine",
    "BaseRolloutServer",
    "CheckpointEngine",
    "Operator",
    "RewardAgent",
    "TransferQueueBackend",
]

#: The abstract class of each kind.
CONTRACTS: dict[str, type] = {
    "engine": BaseEngine,
    "rollout": BaseRolloutServer,
    "agent": AgentLoopBase,
    "reward": RewardAgent,
    "transfer_queue": TransferQueueBackend,
    "checkpoint_engine": CheckpointEngine,
    "operator": Operator,
}

#: The seven kinds of plugin, in the order in which they are listed everywhere.
KINDS: tuple[str, ...] = tuple(CONTRACTS)

#: The kinds of which a run has one plugin, each with a section of its configuration; it has any number of operators.
SECTIONS: tuple[str, ...] = tuple(kind for kind in KINDS if kind != "operator")

#: The version of each kind's contract that this host implements, as ``major.minor``. Packages of hooks have no class:
#: their contract is the names and parameters of hooks, and the parts that they register.
ABI_VERSIONS: dict[str, str] = {kind: vars(contract)["abi_version"] for kind, contract in CONTRACTS.items()}
ABI_VERSIONS["hooks"] = "1.0"
