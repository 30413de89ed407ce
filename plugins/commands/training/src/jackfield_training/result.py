"""What a run has left in its folder, as Python objects that a notebook can show."""

from __future__ import annotations

import base64
import html
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from jackfield.compose.export import export_checkpoint
from jackfield.errors import RunError
from jackfield.files import read_lines
from jackfield.observe import plot_learning_curve
from jackfield.trainer.checkpoint import find_checkpoint
from jackfield_huggingface.hub import upload


class Rows(list[dict[str, Any]]):
    """A list of rows. A row has only the values that there are."""

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame``; pandas must be installed."""
        import pandas  # type: ignore[import-untyped, unused-ignore]

        return pandas.DataFrame(self)


@attrs.frozen
class Curve:
    """The learning curve of a run, which a notebook shows as an image."""

    file: Path  #: the run's ``metrics.jsonl``
    title: str

    def save(self, png: str | Path) -> Path:
        """Draw the curve into a PNG file of 1200 x 700 pixels, and return its path."""
        plot_learning_curve([self.file], Path(png), self.title)
        return Path(png)

    def _repr_png_(self) -> bytes:
        with TemporaryDirectory() as folder:
            return self.save(Path(folder, "curve.png")).read_bytes()


@attrs.frozen(kw_only=True)
class Result:
    """A run's folder after :meth:`~jackfield_training.Training.run`; also of a run that was stopped, or failed."""

    folder: Path
    name: str = "run"
    steps: int | None = None  #: completed steps; None if this process has not run it

    @property
    def metrics(self) -> Rows:
        """The rows of ``metrics.jsonl``: ``kind`` (step, evaluation, weights), ``step``, ``time`` and the metrics."""
        return Rows(read_lines(self.folder / "metrics.jsonl"))

    @property
    def samples(self) -> Rows:
        """The rows of the sample tables, each with its ``table``: train, eval, failed or the name of another set."""
        files = sorted((self.folder / "samples").glob("*.jsonl"))
        return Rows({"table": file.stem, **row} for file in files for row in read_lines(file))

    @property
    def curve(self) -> Curve:
        """The learning curve."""
        return Curve(self.folder / "metrics.jsonl", self.name)

    @property
    def model(self) -> Path:
        """The Hugging Face folder with the trained weights, which is there after the last step."""
        return self.folder / "model"

    def save(self, path: str | Path, *, merge: bool = False) -> Path:
        """Write the trained model to an absent or empty folder, with its tokenizer and model card; return the path.

        It is the model of the last step, or of the newest checkpoint if the run has not ended. ``merge`` merges an
        adapter into its base model. Errors are those of :func:`~jackfield.compose.export.export_checkpoint`.
        """
        out = Path(path)
        if merge or not self.model.is_dir():
            export_checkpoint(find_checkpoint(self.folder), out, merge=merge)
        elif out.exists() and not (out.is_dir() and not any(out.iterdir())):
            what, fix = "the folder for the model is not empty", "choose another one"
            raise RunError(what, code="run.storage", where=str(out), expected="an empty or absent folder", fix=fix)
        else:
            shutil.copytree(self.model, out, dirs_exist_ok=True)
        return out

    def push_to_hub(
        self, name: str, *, private: bool | None = None, token: str | None = None, merge: bool = False
    ) -> str:
        """Upload what :meth:`save` writes to the model repository ``OWNER/NAME``, and return its address.

        The repository is created if there is none. Raise ``run.failed`` with the Hub's answer.
        """
        with TemporaryDirectory() as folder:
            return upload(self.save(Path(folder, "model"), merge=merge), name, private=private, token=token)

    def _repr_html_(self) -> str:
        text = html.escape(f"{self.name}: {self.steps} steps in {self.folder}")
        if not (metrics := self.folder / "metrics.jsonl").is_file():
            return f"<p>{text}</p>"
        image = base64.b64encode(Curve(metrics, self.name)._repr_png_()).decode()
        return f'<p>{text}</p><img width="600" src="data:image/png;base64,{image}">'
