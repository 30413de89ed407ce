"""Advantage estimators and losses: seconds, peak memory, and how many times faster than a plain loop.

    python benchmarks/algorithms.py [--rows 10000] [--length 1000] [--group 8] [--repeat 5] [--quick]
        [--json] [--only NAME]

Each is measured on one batch of rows x length tokens in float32, with the threads that torch takes. The plain loop goes
row by row (GAE: token by token) on a small share of the rows and is scaled up. Memory is what the process grows by at
most while the call runs, in copies of the ``[rows, length]`` input; a loss is measured with its gradient. Seconds are
the best of the calls: what else the machine does only ever adds to them. Where ``verl`` can be imported, its own
vectorised GRPO and RLOO, and its GAE, are measured on the same tensors; where not, the output says why, and the exit
status is 2. ``--quick`` takes 200 rows x 50 tokens, unless others are given, in one process: it shows that the
benchmark works, and its figures mean nothing. With ``--json`` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ESTIMATORS = ("grpo", "rloo", "opo", "reinforce_plus_plus", "gae", "optimal_token_baseline")
LOSSES = ("ppo", "gspo", "cispo", "opmd", "opmd_pairwise", "m2po", "kl_cov")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="default: 10000; with --quick 200")
    parser.add_argument("--length", type=int, help="tokens of a response; default: 1000; with --quick 50")
    parser.add_argument("--group", type=int, default=8, help="rows of one task")
    parser.add_argument("--repeat", type=int, help="the best of so many calls; default: 5; with --quick 1")
    parser.add_argument("--quick", action="store_true", help="a small batch")
    parser.add_argument("--json", action="store_true", help="one JSON object in the place of the table")
    parser.add_argument("--only", choices=[*ESTIMATORS, *LOSSES], help="measure this one, and print its JSON object")
    arguments = parser.parse_args()
    for name, usual, quick in (("rows", 10_000, 200), ("length", 1_000, 50), ("repeat", 5, 1)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if arguments.quick else usual)
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments)))
        return
    one_by_one = (lambda name: measure(name, arguments)) if arguments.quick else in_a_process_of_its_own
    results = [one_by_one(name) for name in (*ESTIMATORS, *LOSSES)]
    peers = verl()[1]
    if arguments.json:
        machine = {"machine": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        print(json.dumps({**machine, "settings": vars(arguments), "verl": peers, "results": results}))
    else:
        table(arguments, peers, results)
    sys.exit(0 if verl()[0] else 2)


def table(arguments: argparse.Namespace, peers: str, results: list[dict[str, Any]]) -> None:
    """The same for people."""
    print(f"verl: {peers}")
    print(f"{arguments.rows} rows x {arguments.length} tokens, groups of {arguments.group}")
    print(f"{'name':26}{'seconds':>10}{'copies':>8}{'loop':>10}{'times':>8}  verl")
    for one in results:
        loop = f"{one['loop_seconds']:10.2f}{one['times_faster']:8.0f}" if one["loop_seconds"] else f"{'':18}"
        peer = f"  {one['verl_seconds']:.3f}" if one["verl_seconds"] else ""
        print(f"{one['name']:26}{one['seconds']:10.3f}{one['copies']:8.1f}{loop}{peer}")


def in_a_process_of_its_own(name: str) -> dict[str, Any]:
    """Peak memory only ever grows in a process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Best seconds of ours, of the loop and of verl's."""
    import torch

    torch.manual_seed(0)
    inputs = batch(arguments.rows, arguments.length, arguments.group)
    warm = {key: value[: arguments.group] for key, value in inputs.items()}
    ours = estimator(name) if name in ESTIMATORS else loss(name)
    ours(warm)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours(inputs)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    seconds = best(lambda: ours(inputs), arguments.repeat)
    loop_seconds, peer_seconds = loop(name, inputs, arguments), peer(name, inputs, arguments)
    return {
        "name": name,
        "seconds": seconds,
        "copies": grown / (arguments.rows * arguments.length * 4),
        "loop_seconds": loop_seconds,
        "times_faster": loop_seconds / seconds if loop_seconds else None,
        "verl_seconds": peer_seconds,
    }


def batch(rows: int, length: int, group: int) -> dict[str, Any]:
    """Responses of different lengths with one reward each."""
    import torch

    lengths = torch.randint(length // 2, length + 1, (rows, 1))
    mask = (torch.arange(length) < lengths).float()
    rewards = torch.zeros(rows, length)
    rewards[torch.arange(rows), lengths[:, 0] - 1] = torch.randint(0, 2, (rows,)).float()
    old = -torch.rand(rows, length)
    return {
        "token_rewards": rewards,
        "response_mask": mask,
        "group_ids": torch.arange(rows) // group,
        "values": torch.rand(rows, length),
        "old_log_probs": old,
        "log_probs": old + 0.1 * torch.randn(rows, length),
        "advantages": torch.randn(rows, 1).expand(rows, length).contiguous(),
        "sum_pi_squared": torch.rand(rows, length),
        "rewards": rewards.sum(-1),
    }


def estimator(name: str) -> Callable[[dict[str, Any]], Any]:
    """A call of an estimator."""
    from jackfield.algorithms import advantages

    wanted = ("token_rewards", "response_mask", "group_ids", "values", "old_log_probs", "sum_pi_squared")
    options: dict[str, Any] = {"lam": 0.95} if name == "gae" else {}
    return lambda inputs: advantages(name, **{key: inputs[key] for key in wanted}, **options)


def loss(name: str) -> Callable[[dict[str, Any]], Any]:
    """A call of a loss and its gradient."""
    from jackfield.algorithms import policy_loss

    def run(inputs: dict[str, Any]) -> None:
        """Forward and backward, with the counts of these inputs as the global ones."""
        log_probs = inputs["log_probs"].detach().requires_grad_()
        mask = inputs["response_mask"]
        value, _ = policy_loss(
            name,
            log_probs=log_probs,
            old_log_probs=inputs["old_log_probs"],
            advantages=inputs["advantages"],
            response_mask=mask,
            group_ids=inputs["group_ids"],
            rewards=inputs["rewards"],
            global_tokens=int(mask.sum()),
            global_sequences=len(mask),
        )
        value.backward()

    return run


def loop(name: str, inputs: dict[str, Any], arguments: argparse.Namespace) -> float | None:
    """Seconds of a loop over rows and tokens in plain Python, scaled up from a share of the rows."""
    loops: dict[str, Callable[..., None]] = {"grpo": grpo_loop, "gae": gae_loop}
    if name not in loops:
        return None
    rows: int = arguments.rows
    share = {"grpo": rows, "gae": min(rows, 2 * int(arguments.group))}[name]
    few = {key: value[:share] for key, value in inputs.items()}
    return best(lambda: loops[name](few), 1) * rows / share


def grpo_loop(inputs: dict[str, Any]) -> None:
    """Group by group, row by row."""
    import torch

    scores = inputs["token_rewards"].sum(-1)
    members: dict[int, list[int]] = {}
    for row, group in enumerate(inputs["group_ids"].tolist()):
        members.setdefault(group, []).append(row)
    advantages = torch.zeros_like(inputs["token_rewards"])
    for rows in members.values():
        group_scores = torch.stack([scores[row] for row in rows])
        mean, deviation = group_scores.mean(), group_scores.std()
        for row in rows:
            advantages[row] = (scores[row] - mean) / (deviation + 1e-6) * inputs["response_mask"][row]


def gae_loop(inputs: dict[str, Any]) -> None:
    """Token by token."""
    tables = {key: inputs[key].tolist() for key in ("token_rewards", "values", "response_mask")}
    for rewards, values, mask in zip(*tables.values(), strict=True):
        running = following = 0.0
        for t in range(len(rewards) - 1, -1, -1):
            if mask[t]:
                running = rewards[t] + following - values[t] + 0.95 * running
                following = values[t]


def peer(name: str, inputs: dict[str, Any], arguments: argparse.Namespace) -> float | None:
    """Seconds of verl's own variant, where it can be imported."""
    core_algos = verl()[0]
    if core_algos is None:
        return None
    rewards, mask, groups = inputs["token_rewards"], inputs["response_mask"], inputs["group_ids"].numpy()
    calls: dict[str, Callable[[], Any]] = {
        "grpo": lambda: core_algos.compute_grpo_vectorized_outcome_advantage(rewards, mask, groups),
        "rloo": lambda: core_algos.compute_rloo_vectorized_outcome_advantage(rewards, mask, groups),
        "gae": lambda: core_algos.compute_gae_advantage_return(rewards, inputs["values"], mask, 1.0, 0.95),
    }
    return best(calls[name], arguments.repeat) if name in calls else None


@functools.cache
def verl() -> tuple[Any, str]:
    """Its module of algorithms, and its version; or None, and why not."""
    try:
        from verl.trainer.ppo import core_algos  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        return None, f"cannot be imported: {error}"
    return core_algos, importlib.metadata.version("verl")


def best(call: Callable[[], Any], repeat: int) -> float:
    """Seconds of the fastest of some calls."""
    seconds = []
    for _ in range(max(repeat, 1)):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
