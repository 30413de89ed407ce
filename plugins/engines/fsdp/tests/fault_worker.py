"""One rank of ``test_faults.py``: ``python fault_worker.py SETTINGS.json`` trains one pass, then waits for a line.

It connects to the test, and sends a line of JSON after each pass. Told to ``freeze``, it stops its own process inside
of the loss function.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from jackfield.errors import EngineError
from jackfield_engine_fsdp.config import Config

spec = importlib.util.spec_from_file_location("worker", Path(__file__).with_name("worker.py"))
assert spec is not None
assert spec.loader is not None
kit: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kit)


def main(settings: dict[str, Any]) -> None:
    """Pass after pass, one for each line."""
    connection = socket.create_connection(("127.0.0.1", settings["port"])).makefile("rw")

    def say(**facts: Any) -> None:
        print(json.dumps({"rank": rank, **facts}), file=connection, flush=True)

    rank, rows = settings["rank"], settings["rows"]
    place = {"rank": rank, "world_size": 2, "init_method": f"file://{settings['out']}/meeting"}
    config = Config(wrap="layers", gradient_accumulation="sharded", collective_timeout=settings["timeout"])
    engine = kit.make_engine(settings["model"], config, **place)
    loss = kit.PolicyLoss(rows)

    def freezing(output: Any, data: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return loss(output, data)

    batch = kit.make_batch(rows[rank::2])
    with engine.train_mode():
        engine.forward_backward_batch(batch, loss)
        say()
        for line in connection:
            function = freezing if line.strip() == "freeze" else loss
            try:
                engine.forward_backward_batch(batch, function)
                say()
            except EngineError as error:
                say(code=error.code, message=error.message, found=str(error.found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
