"""Train and serve each tested architecture for three steps of GRPO, and write the results.

.venv/bin/python tools/architecture_runs.py                # all, 10 minutes
.venv/bin/python tools/architecture_runs.py qwen3 mamba2   # these; the others' results stay
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from packages import ROOT

sys.path.insert(0, str(ROOT / "tools" / "testing"))

from jackfield_architecture_runs import QUICKSTART, RESULTS, accepted, run_architecture, runs, split_rows
from jackfield_architectures import ARCHITECTURES, TRAINED, VARIANTS

_AT_ONCE = 16  #: models whose folders two ranks get together


def main() -> None:
    """The command line."""
    names = sys.argv[1:] or [*ARCHITECTURES, *VARIANTS]
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made")
        make_quickstart(made)
        for name in names:
            began = time.monotonic()
            try:
                results[name] = run_architecture(name, made, Path(folder, "one"))
            except Exception as error:
                results.pop(name, None)
                print(f"{name}: no result: {type(error).__name__}: {error}", flush=True)
                shutil.rmtree(Path(folder, "one"), ignore_errors=True)
                continue
            word = "runs" if runs(results[name]) else f"does not run: {results[name]}"
            print(f"{name}: {word} ({time.monotonic() - began:.1f} s)", flush=True)
            shutil.rmtree(Path(folder, "one"))
            results[name] |= accepted(name, Path(folder, "accepted"))
            shutil.rmtree(Path(folder, "accepted"))
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        trained = [name for name in names if name in results and results[name]["trained"] is True]
        for first in range(0, len(trained), _AT_ONCE):
            with tempfile.TemporaryDirectory() as split:
                for name, outcome in split_rows(trained[first : first + _AT_ONCE], Path(split)).items():
                    results[name]["sequence_parallel"] = outcome
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    count = sum(runs(results[name]) for name in TRAINED if name in results)
    print(f"{count} of the {len(TRAINED)} that people train run")


def make_quickstart(folder: Path) -> None:
    """Write the quickstart's problems and tokenizer."""
    spec = importlib.util.spec_from_file_location("make_task", QUICKSTART / "make_task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make_task(folder, seed=5, sizes={"held_out": 8, "demonstrations": 200, "problems": 40})


if __name__ == "__main__":
    main()
