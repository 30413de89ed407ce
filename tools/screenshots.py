"""Makes the screenshots of the documentation, in docs/images/: `make screenshots`.

    python tools/screenshots.py [NAME ...]

It needs what `make quickstart` has left in runs/, the packages of tools/screenshots-requirements.txt, and for pages
Debian's `chromium`. A terminal is one of pyte, whose screen rich writes as SVG.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
QUICKSTART = ROOT / "runs" / "quickstart"
SCRIPTS = Path(sys.executable).parent
WIDTH, LINES = 110, 80  #: of a terminal
SECONDS = 900.0
LARGEST = 200_000  #: bytes
FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  #: which rich's SVG would load from elsewhere


class Shots:
    """The screenshots; each method makes one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def progress(self) -> None:
        """Show a run that goes on."""
        command = "jackfield run examples/quickstart/grpo.yaml folder=runs/again schedule.steps=20 evaluation.every=5"
        shutil.rmtree(ROOT / "runs" / "again", ignore_errors=True)
        self._terminal("progress", command, until=r"\b12/20 ")

    def data_show(self) -> None:
        """Show which tokens a supervised run trains on."""
        self._terminal("data_show", "jackfield data show demonstrations.jsonl --model model -n 3", QUICKSTART / "made")

    def doctor(self) -> None:
        """Show what the doctor says of rollout servers, of which not all have their engine."""
        self._terminal("doctor", "jackfield plugins doctor --kind rollout --deadline 300")

    def trace(self) -> None:
        """Show the page of a rollout."""
        run, page = QUICKSTART / "grpo", self._folder / "trace.html"
        lines = map(json.loads, (run / "samples" / "train.jsonl").read_text(encoding="utf-8").splitlines())
        key = next(line["key"] for line in lines if line["step"] == 1 and line["reward"] > 0)
        self._run([str(SCRIPTS / "jackfield"), "trace", str(run.relative_to(ROOT)), key, "--html", str(page)])
        self._page("trace", page, 1000, 540)

    def notebook(self) -> None:
        """Show the notebook of the examples, executed."""
        import nbclient
        import nbformat
        from nbconvert import HTMLExporter

        notebook = nbformat.read(ROOT / "examples" / "python" / "six_lines.ipynb", as_version=4)
        (self._folder / "runs").mkdir()
        (self._folder / "runs" / "quickstart").symlink_to(QUICKSTART)
        resources = {"metadata": {"path": str(self._folder)}}
        nbclient.NotebookClient(notebook, timeout=SECONDS, resources=resources).execute()
        widget = "application/vnd.jupyter.widget-view+json"  # the bar, whose scripts are elsewhere
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            cell.outputs = [output for output in cell.outputs if widget not in output.get("data", {})]
        html, _ = HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True).from_notebook_node(notebook)
        page = self._folder / "notebook.html"
        page.write_text(html, encoding="utf-8")
        self._page("notebook", page, 900, 1210)

    def _terminal(self, name: str, shown: str, folder: Path = ROOT, until: str = "") -> None:
        """Save the screen of a command at its end, or when a line matches ``until``; then end the command."""
        import pyte

        screen = pyte.Screen(WIDTH, LINES)
        stream = pyte.ByteStream(screen)
        main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, WIDTH, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        command = [str(SCRIPTS / "jackfield"), *shown.split()[1:]]
        process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, cwd=folder, env=environment)
        os.close(side)
        late = threading.Timer(SECONDS, process.kill)
        late.start()
        try:
            while not until or not any(re.search(until, line) for line in screen.display):
                stream.feed(os.read(main, 65536))
        except OSError:  # the command has ended
            if until:
                sys.exit(f"{name}: no line matches {until!r}:\n" + "\n".join(screen.display).strip())
        finally:
            late.cancel()
            process.kill()
            process.wait()
            os.close(main)
        self._write(f"{name}.svg", _svg(name, shown, screen))

    def _page(self, name: str, page: Path, width: int, height: int) -> None:
        """Save how a browser shows a page."""
        browser = shutil.which("chromium") or sys.exit("chromium is not installed: apt-get install chromium")
        file = self._folder / f"{name}.png"
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--screenshot={file}"]
        options += [f"--user-data-dir={self._folder / 'browser'}", f"--window-size={width},{height}"]
        self._run([browser, *options, page.as_uri()])
        self._write(file.name, file.read_bytes())

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd=ROOT, timeout=SECONDS, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode:
            sys.exit(done.stdout.decode(errors="replace")[-2000:])

    def _write(self, name: str, content: bytes) -> None:
        if len(content) > LARGEST:
            sys.exit(f"{name} has {len(content)} bytes; a picture may have {LARGEST}")
        (IMAGES / name).write_bytes(content)
        print(f"docs/images/{name}: {len(content)} bytes", flush=True)


SHOTS: dict[str, Callable[[Shots], None]] = {
    name: function for name, function in vars(Shots).items() if not name.startswith("_")
}


def _svg(name: str, command: str, screen: Any) -> bytes:
    """Draw the screen below the command."""
    from rich.console import Console
    from rich.terminal_theme import DIMMED_MONOKAI
    from rich.text import Text

    rows = [_row(screen, number) for number in range(screen.lines)]
    while not rows[-1].plain:
        rows.pop()
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in (Text(f"$ {command}", style="bold"), *rows):
        console.print(line, overflow="fold")
    return FONTS.sub("", console.export_svg(title="", theme=DIMMED_MONOKAI, unique_id=name)).encode()


def _row(screen: Any, number: int) -> Any:
    """Take a line of the screen, with its colours."""
    from rich.style import Style
    from rich.text import Text

    text = Text()
    cells = [screen.buffer[number][column] for column in range(screen.columns)]
    for look, alike in groupby(cells, lambda cell: cell._replace(data="")):
        style = Style(color=_colour(look.fg), bgcolor=_colour(look.bg), bold=look.bold, reverse=look.reverse)
        text.append("".join(cell.data for cell in alike).replace(str(ROOT), "~/jackfield"), style)
    text.rstrip()
    return text


def _colour(name: str) -> str:
    """Name a colour of pyte as rich does."""
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return name.replace("brown", "yellow").replace("bright", "bright_")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(SHOTS)}")
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*SHOTS}:
        parser.error(f"no such screenshot: {', '.join(sorted(unknown))} (known: {', '.join(SHOTS)})")
    if not (QUICKSTART / "grpo" / "model").is_dir():
        sys.exit(f"{QUICKSTART} has no finished run: make quickstart")
    for name in arguments.names or SHOTS:
        with tempfile.TemporaryDirectory() as folder:
            SHOTS[name](Shots(Path(folder)))


if __name__ == "__main__":
    main()
