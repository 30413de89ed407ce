"""The comparison of all subjects of a command: what runs, in which order, and the report."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import xxhash
import yaml
from safetensors.torch import load_file

from jackfield.abc.engine import ModelSpec
from jackfield.errors import ConfigError, EngineError, JackfieldError
from jackfield.plugins import discover
from jackfield.settings import structure
from jackfield_parity.batch import Batch, LossSettings, Settings, near, random_rows, read_batch, write_batch
from jackfield_parity.compare import MEASURES, Judge, Line, engine_lines, gradient_line, parameter_line
from jackfield_parity.hosts import Hosts
from jackfield_parity.launch import Played, play_engine, play_server, play_trl
from jackfield_parity.reference import Expected, Reference, check_supported, tiny_model
from jackfield_parity.subjects import Subject, parse_subject

STEPS = 3
TINY = ("tiny", "tiny-moe")
#: Prompt and response tokens of the rows of a random batch: very different, in no order.
LENGTHS = ((3, 5), (7, 1), (1, 9), (12, 4), (5, 6), (2, 13), (9, 7), (4, 4))


@attrs.frozen(kw_only=True)
class Request:
    """The arguments of the command."""

    engines: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    model: str = "tiny"
    batch: Path | None = None
    loss: tuple[str, ...] = ()
    trl: str | None = None
    with_trl: bool = True
    tolerances: tuple[str, ...] = ()
    seconds: float = 600.0


@attrs.frozen(kw_only=True)
class Report:
    """All comparisons, failures and what was left out."""

    model: str
    rows: int
    tokens: int
    lines: tuple[Line, ...]
    errors: Mapping[str, JackfieldError]  #: by subject
    skipped: Mapping[str, str]  #: reasons by subject

    @property
    def ok(self) -> bool:
        """Return whether nothing failed and all errors are within their tolerances."""
        return not self.errors and all(line.ok for line in self.lines)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields."""
        return {
            "ok": self.ok,
            "model": self.model,
            "batch": {"rows": self.rows, "response_tokens": self.tokens},
            "comparisons": [line.as_dict() for line in self.lines],
            "errors": {name: error.as_dict() for name, error in self.errors.items()},
            "skipped": dict(self.skipped),
        }

    def table(self, *, by_name: bool = False) -> list[dict[str, Any]]:
        """Return the rows of a table for people."""
        rows: list[dict[str, Any]] = []
        for line in self.lines:
            verdict = "ok" if line.ok else "BEYOND TOLERANCE"
            fixed = {"subject": line.subject, "measure": line.measure, "tolerance": f"{line.tolerance:.0e}"}
            rows.append({**fixed, "error": f"{line.error:.2e}", "verdict": verdict, "where": line.where})
            for name, error in line.by_name.items() if by_name else ():
                own = "ok" if error <= line.tolerance else "BEYOND TOLERANCE"
                rows.append({**fixed, "error": f"{error:.2e}", "verdict": own, "where": name})
        for name, refusal in self.errors.items():
            found = {} if refusal.found is None else {"found": str(refusal.found)[-2000:]}
            rows.append({"subject": name, "verdict": "FAILED", "where": f"[{refusal.code}] {refusal.message}", **found})
        rows += [{"subject": name, "verdict": "skipped", "where": reason} for name, reason in self.skipped.items()]
        return rows

    def summary(self) -> str:
        """Return the verdict in one line."""
        beyond = sum(not line.ok for line in self.lines)
        text = f"{len(self.lines) - beyond} of {len(self.lines)} comparisons are within their tolerances"
        return text + (f"; {len(self.errors)} failed" if self.errors else "")


class Oracle:
    """One run of the command."""

    def __init__(self, request: Request, folder: Path, say: Callable[[str], None] = lambda _: None) -> None:
        """Check all arguments before anything runs."""
        self._request, self._folder, self._say = request, folder, say
        registry = discover()
        self._engines = [parse_subject(text, registry, "engine") for text in request.engines]
        self._servers = [parse_subject(text, registry, "rollout") for text in request.servers]
        self._tolerances = _tolerances(request.tolerances)
        twice = [text for text in (*request.engines, *request.servers) if request.engines.count(text) > 1]
        if twice:
            raise ConfigError("an engine is named twice", where=twice[0], expected="different settings", found=twice[0])
        self._path = self._model()
        self._batch = self._read()
        for subject in self._engines:
            base = self._batch.settings.optimizer
            check_supported(subject.model_spec(self._path), subject.optimizer_spec(base))
        check_supported(ModelSpec(path=self._path), self._batch.settings.optimizer)
        self._known: dict[str, Expected] = {}
        self._lines: list[Line] = []
        self._errors: dict[str, JackfieldError] = {}
        self._skipped: dict[str, str] = {}

    def run(self, write: Path | None = None) -> Report:
        """Run servers, engines, the reference and TRL; return the report."""
        servers: dict[str, Batch] = {}
        for number, subject in enumerate(self._servers):
            self._say(f"{subject.label}: generating")
            place = self._folder / f"server-{number}"
            with self._failures(subject.label):
                made = play_server(subject, self._batch, self._path, place, self._request.seconds)
                servers[subject.label] = made
        files = {}
        for number, (name, batch) in enumerate(servers.items()):
            files[name] = str(self._folder / f"rollout-{number}.safetensors")
            write_batch(batch, Path(files[name]))
        plan = {"model_path": self._path, "steps": STEPS, "rollouts": files}
        with Hosts(self._folder) as hosts:
            for number, subject in enumerate(self._engines):
                self._say(f"{subject.label}: {STEPS} steps")
                place = self._folder / f"engine-{number}"
                with self._failures(subject.label):
                    played = play_engine(subject, self._batch, plan, place, self._request.seconds, hosts)
                    judge = self._judge(subject.label, subject.precision)
                    self._lines += engine_lines(judge, self._expected(servers, subject, played), played, servers)
        self._other_lines(servers)
        if write is not None:
            self._write(write, self._expected(servers))
        return Report(
            model=self._request.model,
            rows=len(self._batch),
            tokens=sum(map(len, self._batch.response_ids)),
            lines=tuple(self._lines),
            errors=self._errors,
            skipped=self._skipped,
        )

    def _other_lines(self, servers: Mapping[str, Batch]) -> None:
        """Compare what is no engine with the reference of the plain model."""
        for subject in self._servers:
            if subject.label in servers:
                expected, own = self._expected(servers, subject), servers[subject.label]
                judge = self._judge(subject.label, subject.precision)
                self._lines.append(judge.log_probs(expected.rollouts[subject.label], own.old_log_probs))
        if self._batch.results:
            self._framework_lines(self._expected(servers))
        if self._request.with_trl:
            with self._failures("TRL"):
                self._trl_lines(servers)

    def _framework_lines(self, expected: Expected) -> None:
        judge, results = self._judge(self._batch.framework, "float32"), self._batch.results
        if "log_probs" in results:
            sizes = [len(row) for row in self._batch.response_ids]
            self._lines.append(judge.log_probs(expected.log_probs, list(results["log_probs"].split(sizes))))
        if "loss" in results:
            self._lines.append(judge.line("loss", abs(float(results["loss"]) - expected.loss)))
        for kind, compared in (("gradients", gradient_line), ("parameters", parameter_line)):
            named = {n.removeprefix(f"{kind}."): one for n, one in results.items() if n.startswith(f"{kind}.")}
            if named:
                self._lines.append(compared(judge, expected, named))

    def _trl_lines(self, servers: Mapping[str, Batch]) -> None:
        loss, python = self._batch.settings.loss, self._request.trl
        if python is None and importlib.util.find_spec("trl") is None:
            self._skipped["TRL"] = "TRL is not installed in this interpreter; --trl PYTHON names another"
            return
        if loss.aggregation == "seq-mean-token-sum" or loss.clip_dual is not None or loss.entropy_coefficient:
            self._skipped["TRL"] = "its loss has no seq-mean-token-sum, clip_dual or this entropy bonus"
            return
        self._say("TRL: its own loss")
        place = self._folder / "trl"
        file, facts = play_trl(python or sys.executable, self._batch, self._path, place, self._request.seconds)
        expected, tensors = self._expected(servers), load_file(file)
        judge, sizes = self._judge(f"TRL {facts['version']}", "float32"), [len(r) for r in self._batch.response_ids]
        named = {n.removeprefix("gradients/"): one for n, one in tensors.items() if n.startswith("gradients/")}
        self._lines += [
            judge.log_probs(expected.log_probs, list(tensors["log_probs"].split(sizes))),
            judge.line("loss", abs(facts["loss"] - expected.loss)),
            gradient_line(judge, expected, named),
        ]

    def _judge(self, subject: str, precision: str) -> Judge:
        return Judge(subject, precision, self._tolerances)

    def _failures(self, subject: str) -> _Failures:
        return _Failures(self._errors, subject, self._say)

    def _expected(
        self, servers: Mapping[str, Batch], subject: Subject | None = None, played: Played | None = None
    ) -> Expected:
        """Return the reference for a subject's model and optimizer, computed once for equal ones."""
        base = self._batch.settings.optimizer
        spec = ModelSpec(path=self._path) if subject is None else subject.model_spec(self._path)
        optimizer = base if subject is None else subject.optimizer_spec(base)
        adapter = played.start if played is not None and spec.lora is not None else None
        hashed = [(name, tensor.tolist()) for name, tensor in (adapter or {}).items()]
        spec = attrs.evolve(spec, gradient_checkpointing=False)
        key = xxhash.xxh3_128_hexdigest(repr((spec, optimizer, hashed)).encode())
        if key not in self._known:
            self._say("the reference in float64")
            reference = Reference(spec, adapter, None if played is None else played.peft_config)
            self._known[key] = reference.train(self._batch, optimizer, STEPS, servers)
        return self._known[key]

    def _write(self, file: Path, expected: Expected) -> None:
        import torch

        results = {"log_probs": torch.cat(expected.log_probs), "loss": torch.tensor(expected.loss)}
        results |= {f"gradients.{name}": one for name, one in expected.gradients.items()}
        results |= {f"parameters.{name}": one for name, one in expected.parameters.items()}
        write_batch(attrs.evolve(self._batch, results=results, framework="the float64 reference"), file)

    def _model(self) -> str:
        """Return the folder of the model; write a tiny one where that was asked for."""
        name = self._request.model
        if name in TINY and not Path(name).exists():
            tiny_model(self._folder / name, name)
            return str(self._folder / name)
        if not (Path(name) / "config.json").is_file():
            expected, fix = f"a Hugging Face folder, or {' or '.join(TINY)}", "correct --model"
            details = {"where": name, "expected": expected, "found": "no config.json", "fix": fix}
            raise EngineError("there is no model", code="engine.model", **details)
        return str(Path(name).absolute())

    def _read(self) -> Batch:
        """Return the batch of the file, or a random one, whose old log-probs are near the model's."""
        config = json.loads((Path(self._path) / "config.json").read_text(encoding="utf-8"))
        vocabulary = int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)
        if self._request.batch is None:
            loss = structure(LossSettings, dict(_pair(text, "--loss") for text in self._request.loss), "--loss")
            rows = attrs.evolve(random_rows(vocabulary, LENGTHS), settings=Settings(loss=loss))
            return near(rows, Reference(ModelSpec(path=self._path)).log_probs(rows))
        batch = read_batch(self._request.batch)
        highest = max(int(row.max()) for row in (*batch.prompt_ids, *batch.response_ids) if len(row))
        lowest = min(int(row.min()) for row in (*batch.prompt_ids, *batch.response_ids) if len(row))
        if highest >= vocabulary or lowest < 0:
            details = {"expected": f"ids from 0 to {vocabulary - 1}", "found": f"{lowest} to {highest}"}
            message, fix = "the batch has tokens that the model does not have", "give the batch's model with --model"
            raise ConfigError(message, where=str(self._request.batch), fix=fix, **details)
        return batch


@attrs.frozen
class _Failures:
    """Keeps the error of a subject, so that the others go on."""

    errors: dict[str, JackfieldError]
    subject: str
    say: Callable[[str], None]

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, JackfieldError):
            self.errors[self.subject] = error
            self.say(f"{self.subject}: failed\n{error}")
            return True
        return False


def _pair(text: str, where: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError("an option is not understood", where=where, expected="KEY=VALUE", found=text)
    return key, yaml.safe_load(value)


def _tolerances(texts: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for text in texts:
        measure, value = _pair(text, "--tolerance")
        number = isinstance(value, int | float | str) and not isinstance(value, bool)
        try:
            found[measure] = float(value) if number else -1.0
        except ValueError:
            found[measure] = -1.0
        if measure not in MEASURES or not found[measure] >= 0.0:
            expected = f"one of {', '.join(MEASURES)}, and a number of at least 0"
            raise ConfigError("a tolerance is not understood", where="--tolerance", expected=expected, found=text)
    return found
