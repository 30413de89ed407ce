"""Operators on the experiences of a run: what they read and ask, what they make, and what they have learnt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from jackfield.cli import main
from jackfield.errors import JackfieldError
from jackfield_pipelines.samples import rows_of_samples

from .conftest import Run
from .test_mixing import SMALL, acked
from .test_modes import steps

#: Two operators, installed beside the others.
PACKAGE = {
    "own_operators/__init__.py": "",
    "own_operators/repair.toml": """
        name = "own_repair"
        kind = "operator"
        abi = "1.0"
        object = "own_operators.operators:Repair"
        config = "own_operators.operators:RepairConfig"
        description = "Makes a better answer of each of the first ones"
    """,
    "own_operators/count.toml": """
        name = "own_count"
        kind = "operator"
        abi = "1.0"
        object = "own_operators.operators:Count"
        config = "own_operators.operators:CountConfig"
        description = "Counts the responses that it has seen"
    """,
    "own_operators/ask.toml": """
        name = "own_ask"
        kind = "operator"
        abi = "1.0"
        object = "own_operators.operators:Ask"
        config = "own_operators.operators:AskConfig"
        description = "Asks the model for an answer to each task, and scores it"
    """,
    "own_operators/first.toml": """
        name = "own_first"
        kind = "operator"
        abi = "1.0"
        object = "own_operators.operators:First"
        config = "own_operators.operators:FirstConfig"
        description = "Keeps the first rollouts of each group"
    """,
    "own_operators/odd.toml": """
        name = "own_odd"
        kind = "operator"
        abi = "1.0"
        object = "own_operators.operators:Odd"
        config = "own_operators.operators:CountConfig"
        description = "Gives every second sample of later steps no reward"
    """,
    "own_operators/operators.py": """
        import attrs
        from jackfield.abc.operator import NewRow, Operator, OperatorResult
        from jackfield.sdk import option

        @attrs.frozen(kw_only=True)
        class RepairConfig:
            asks: bool = option(False, "ask the policy, too")

        class Repair(Operator):
            type = "synthesizer"
            reads = ("response", "messages", "reward", "log_prob_mean", "log_prob_min")
            writes = ("response", "reward", "*")

            @property
            def uses(self):
                return ("policy", "reward") if self.config.asks else ("reward",)

            async def process(self, request):
                made = []
                for row in request.rows:
                    assert row.values["log_prob_min"] <= row.values["log_prob_mean"] < 0.0
                    self.context.count("seen", 1)
                    if self.config.asks:
                        answer = await self.context.generate("policy", row.values["messages"], max_new_tokens=3, seed=1)
                        self.context.count("tokens", answer.tokens)
                    better = row.values["response"] + "b"
                    score = await self.context.score(row.values, better)
                    made.append(NewRow(parents=(row.key,), values={"response": better, "reward": score}))
                return OperatorResult(made=tuple(made[:1]))

        @attrs.frozen(kw_only=True)
        class AskConfig:
            says: bool = option(True, "say what it uses")

        class Ask(Operator):
            type = "mapper"
            reads = ("*",)
            writes = ("answer", "pass_rate")

            @property
            def uses(self):
                return ("policy", "reward") if self.config.says else ()

            async def process(self, request):
                updates = {}
                for row in request.rows:
                    asked = [{"role": "user", "content": row.values["question"]}]
                    sampling = {"max_new_tokens": 3, "seed": self.context.seed}
                    answer = await self.context.generate("policy", asked, **sampling)
                    score = await self.context.score(row.values, answer.text)
                    updates[row.key] = {"answer": answer.text, "pass_rate": score}
                return OperatorResult(updates=updates)

        @attrs.frozen(kw_only=True)
        class FirstConfig:
            keeps: int = option(1, "rollouts that are kept")

        class First(Operator):
            type = "filter"
            reads = ("group",)
            writes = ("place",)
            decides_by = ("keeps",)
            compares = True

            async def process(self, request):
                seen, updates = {}, {}
                for row in request.rows:
                    seen[row.values["group"]] = place = seen.get(row.values["group"], 0) + 1
                    updates[row.key] = {"place": place}
                return OperatorResult(updates=updates)

            def decide(self, rows):
                return {row.key: "not the first" for row in rows if row.values["place"] > self.config.keeps}

        @attrs.frozen(kw_only=True)
        class CountConfig:
            pass

        class Odd(Operator):
            type = "scorer"
            reads = ("reward",)
            writes = ("reward",)

            async def process(self, request):
                odd = float("nan") if request.batch >= 2 else 0.5
                rewards = [(0.5, odd)[number % 2] for number in range(len(request.rows))]
                keys = [row.key for row in request.rows]
                return OperatorResult(updates={key: {"reward": each} for key, each in zip(keys, rewards)})

        class Count(Operator):
            type = "scorer"
            reads = ("response",)
            writes = ("count",)
            seen = 0

            async def process(self, request):
                self.seen += len(request.rows)
                return OperatorResult(updates={row.key: {"count": self.seen} for row in request.rows})

            def state(self):
                return {"seen": self.seen}

            def restore(self, state):
                self.seen = state["seen"]
    """,
    "own_operators-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: own-operators\nVersion: 1.0\n",
    "own_operators-1.0.dist-info/entry_points.txt": """
        [jackfield.operators]
        own_repair = own_operators:repair.toml
        own_count = own_operators:count.toml
        own_ask = own_operators:ask.toml
        own_first = own_operators:first.toml
        own_odd = own_operators:odd.toml
    """,
}


@pytest.fixture(autouse=True, scope="module")
def installed_operators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lay the package out as pip leaves it."""
    folder = tmp_path_factory.mktemp("site")
    for name, text in PACKAGE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text))
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        yield


def on_tasks(operator: str, **settings: Any) -> str:
    """An operator on tasks, as an override."""
    return f"data.pipeline={json.dumps({'tasks': [{'name': operator, **settings}], 'rows_per_request': 64})}"


def test_operators_on_tasks_ask_the_model_and_the_reward(small_run: Run) -> None:
    """What they find is in the records; another model is another stage; what they do not say they use is refused."""
    result, _ = small_run("asked", "schedule.steps=1", *SMALL, on_tasks("own_ask"))
    (stage,) = (result.folder / "data").glob("1-own_ask-*")
    rows = [json.loads(line) for line in (stage / "rows.jsonl").read_text().splitlines()]
    assert len(rows) > 64
    assert {str} == {type(row["answer"]) for row in rows}
    assert {0.0} <= {row["pass_rate"] for row in rows}
    uses = json.loads((stage / "manifest.json").read_text())
    assert "policy" in json.dumps(uses)
    with pytest.raises(JackfieldError) as caught:
        small_run("silent", "schedule.steps=1", *SMALL, on_tasks("own_ask", says=False))
    assert ("operator.contract", "own_ask") == (caught.value.code, caught.value.where)


def test_the_policy_says_how_hard_tasks_are(small_run: Run) -> None:
    """By the share of its answers that the reward takes; easy ones come first, and the hardest are left out."""
    hard = "{name: difficulty_pass_rate, samples: 2, max_tokens: 3, threshold: 0.05}"
    first = "{name: priority, weights: {difficulty: -1.0}, limit: 32}"
    settings = (f"data.pipeline.tasks=[{hard}, {first}]", "schedule.steps=1")
    result, _ = small_run("rated", *SMALL, *settings)
    (last,) = (result.folder / "data").glob("2-priority-order-*")
    rows = [json.loads(line) for line in (last / "rows.jsonl").read_text().splitlines()]
    assert 32 == len(rows)
    assert {row["pass_rate"] for row in rows} <= {0.0, 0.5, 1.0}
    assert [row["difficulty"] for row in rows] == sorted(row["difficulty"] for row in rows)
    (rated,) = (result.folder / "data").glob("1-difficulty_pass_rate-*")
    assert {"policy", "reward"} == set(json.loads((rated / "manifest.json").read_text())["uses"])


def test_failed_responses_are_repaired_by_the_policy_and_trained_on(small_run: Run) -> None:
    """Every second answer passes a low gate; repairs are an expert's samples."""
    repair = "{name: repair, template: '{prompt}', attempts: 2, max_tokens: 3, below: 9, gate: {minimum: 0.0}}"
    settings = ("algorithm.name=mix", "mixing.made={ratio: 0.5}", f"data.pipeline.experiences=[{repair}]")
    result, lines = small_run("repaired", *settings, "schedule.steps=3", *SMALL)
    assert 1.0 <= sum(line.get("samples/made", 0.0) for line in steps(lines))
    assert all(line["pipeline/made"] == 4.0 for line in steps(lines))
    rows = [json.loads(line) for line in (result.folder / "made" / "worker-0.jsonl").read_text().splitlines()]
    assert {"repair"} == {row["operator"] for row in rows}
    assert 3 * 4 == len(rows)


def test_a_sample_is_traced_to_its_line_and_back(small_run: Run) -> None:
    """From a key of the ledger to the stages of its row and the raw line, and from the row to all its samples."""
    shaping = "data.pipeline.experiences=[{name: diversity, weight: 0.4}]"
    settings = ("data.pipeline.tasks=[{name: difficulty_rules}]", shaping)
    result, _ = small_run("traced", "schedule.steps=2", *SMALL, *settings)

    def trace(name: str) -> Any:
        shown = CliRunner().invoke(main, ["data", "trace", str(result.folder), name, "--json"])
        assert 0 == shown.exit_code, shown.output
        return json.loads(shown.output)

    found = trace("train/1/0/0/1/0")
    (read, changed) = found["rows"][0]
    (sample,) = found["samples"]
    assert ("read", "changed") == (read["what"], changed["what"])
    assert {"difficulty"} <= changed["detail"].keys()
    assert ("train/1/0/0/1/0", 1) == (sample["sample"], sample["step"])
    (shaper,) = found["operators"]
    assert ("diversity", 0.4) == (shaper["operator"], shaper["settings"]["weight"])
    assert {"reward", "unshaped", "diversity"} <= sample["shaped"].keys()
    file, _, line = read["detail"].rpartition(":")
    raw = json.loads(Path(file).read_text().splitlines()[int(line) - 1])
    rows = [json.loads(each) for each in (result.folder / "samples" / "train.jsonl").read_text().splitlines()]
    mine = next(row for row in rows if row["key"] == "train/1/0/0/1/0")
    assert raw["question"].split()[0] in mine["prompt"]
    back = trace(sample["row"])
    assert {"train/1/0/0/0/0", "train/1/0/0/1/0"} <= {each["sample"] for each in back["samples"]}
    text = CliRunner().invoke(main, ["data", "trace", str(result.folder), "train/1/0/0/1/0"]).output
    assert "trained on at step 2" in text
    assert f"shaped: reward {sample['shaped']['unshaped']:.6g} before; reward" in text
    assert "shaped by diversity 0.1.0(weight=0.4" in text
    listed = CliRunner().invoke(main, ["data", "sets", str(result.folder), "--json"])
    assert ["source", "difficulty_rules"] == [each["operator"].split()[0] for each in json.loads(listed.output)]


def test_sets_keep_their_weights_after_a_pipeline(small_run: Run, made: Path, tmp_path: Path) -> None:
    """Three of four tasks are of the first set, although duplicates over both sets are left out."""
    lines = (made / "problems.jsonl").read_text().splitlines()
    (tmp_path / "first.jsonl").write_text("\n".join(lines[:40]))
    (tmp_path / "second.jsonl").write_text("\n".join([*lines[:5], *lines[40:80]]))
    sets = [
        {"path": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in (("first", 3), ("second", 1))
    ]
    settings = (f"data.train={json.dumps(sets)}", "data.pipeline.tasks=[{name: exact_duplicates}]")
    result, _ = small_run("mixed", *SMALL, *settings, "data.groups_per_batch=4", "schedule.steps=2")
    rows = {key.rsplit("/", 2)[0]: row.partition(":")[0] for key, row in rows_of_samples(result.folder).items()}
    assert {"first": 6, "second": 2} == Counter(rows.values())
    sources = CliRunner().invoke(main, ["data", "sets", str(result.folder), "--json"])
    (source, stage) = json.loads(sources.output)
    assert (85, 80, 5) == (source["rows"], stage["rows"], stage["removed"])
    refused = "data.pipeline.tasks=[{name: difficulty_rules}, {name: priority, weights: {difficulty: 1.0}}]"
    with pytest.raises(JackfieldError) as caught:
        small_run("refused", *SMALL, *settings, refused)
    assert "data.train" == caught.value.where


def test_pairs_are_no_answers_to_imitate(small_run: Run) -> None:
    """A pair has the response of a parent, and no own one: it is a line of the file, and no sample."""
    settings = ("algorithm.name=mix", "mixing.made={ratio: 1}", "schedule.steps=3", *SMALL)
    result, lines = small_run("pairs", *settings, by("preference_pairs"))
    assert {0.0} == {line.get("samples/made", 0.0) for line in steps(lines)}
    rows = [json.loads(line) for line in (result.folder / "made" / "worker-0.jsonl").read_text().splitlines()]
    assert rows
    assert all({"chosen", "rejected", "margin"} <= row.keys() for row in rows)


def by(operator: str, **settings: Any) -> str:
    """An operator on experiences, as an override."""
    return f"data.pipeline.experiences={json.dumps([{'name': operator, **settings}])}"


@pytest.mark.parametrize("asks", [False, True])
def test_what_operators_make_is_trained_on(small_run: Run, asks: bool) -> None:
    """One answer of each request becomes an expert's group; what is there is mixed in, and nothing is waited for."""
    settings = ("algorithm.name=mix", "schedule.steps=4", "mixing.made={ratio: 1}", by("own_repair", asks=asks))
    result, lines = small_run("made", *settings, *SMALL)
    used = [keys for consumer, _, keys in acked(result.folder) if consumer == "trainer/made"]
    keys = [key for each in used for key in each]
    assert len(keys) >= 3
    assert len(keys) == len(set(keys)), "each once"
    counted = steps(lines)
    assert [line.get("samples/made", 0.0) for line in counted][-1] >= 1.0
    assert 4 * 4 == sum(line["pipeline/seen"] for line in counted)
    assert asks == any("pipeline/tokens" in line for line in counted)
    rows = [json.loads(line) for line in (result.folder / "made" / "worker-0.jsonl").read_text().splitlines()]
    assert {"own_repair"} == {row["operator"] for row in rows}
    assert len(rows) == len({row["_row"] for row in rows}) >= len(keys)
    for row in rows:
        assert row["response"].endswith("b")
        assert row["_row"] == f"{row['parents'][0]}>1.1"
    shown = CliRunner().invoke(main, ["queue", "trace", str(result.folder), keys[0]])
    assert 0 == shown.exit_code, shown.output
    first = next(row for row in rows if row["parents"][0] in shown.output)
    assert "own_repair" in shown.output
    assert first["batch"] == int(first["parents"][0].split("/")[1])


@pytest.mark.parametrize(("keeps", "samples"), [(1, {2.0}), (0, {0.0})])
def test_what_a_filter_leaves_out_is_not_trained_on(small_run: Run, keeps: int, samples: set[float]) -> None:
    """One rollout of each group, or none: groups are smaller, or others come in their places, but not forever."""
    settings = (by("own_first", keeps=keeps), "schedule.steps=3", "schedule.max_retries=1", *SMALL)
    if keeps:
        _, lines = small_run("filtered", *settings)
        assert samples == {line["samples"] for line in steps(lines)}
        return
    with pytest.raises(JackfieldError) as caught:
        small_run("filtered", *settings)
    assert "operators left out all of its samples" in str(caught.value)


def test_a_run_ends_if_too_many_samples_are_set_aside_and_goes_on_from_its_checkpoint(small_run: Run) -> None:
    """Half of the samples have no reward from the third step on: the others are trained on until the limit."""
    batch = ("data.groups_per_batch=4", "data.rollouts_per_group=4")
    settings = (by("own_odd"), "checkpoint.every=2", "schedule.steps=6", *SMALL, *batch)
    with pytest.raises(JackfieldError) as caught:
        small_run("odd", *settings, "data.pipeline.maximum_set_aside=0")
    assert ("operator.set-aside", "own_odd") == (caught.value.code, caught.value.where)
    assert "is no finite number" in str(caught.value.found)
    _, lines = small_run("odd", *settings, "data.pipeline.maximum_set_aside=0.5")
    counted = {line["step"]: line["samples"] for line in steps(lines)}
    assert {1: 16.0, 2: 16.0, 3: 8.0, 4: 8.0, 5: 8.0, 6: 8.0} == counted


def test_what_operators_have_learnt_is_resumed(small_run: Run) -> None:
    """The counter goes on where the checkpoint ends, and weights are those of a run that was not stopped."""
    settings = (by("own_count"), "checkpoint.every=2", *SMALL)
    whole, lines = small_run("whole", "schedule.steps=4", *settings)
    small_run("parts", "schedule.steps=2", *settings)
    parts, again = small_run("parts", "schedule.steps=4", *settings)

    def counts(found: list[dict[str, Any]]) -> Mapping[int, float]:
        return {line["step"]: line["reward/count/mean"] for line in steps(found)}

    assert counts(lines) == counts(again)
    assert 12.0 < counts(lines)[4] <= 16.0
    weights = [load_file(each.model / "model.safetensors") for each in (whole, parts)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_made_samples_need_what_makes_and_what_trains_on_them(small_run: Run) -> None:
    for settings, where in (
        (("mixing.made={ratio: 1}", by("own_repair")), "mixing.made"),
        (("mixing.made={ratio: 1}", "algorithm.name=mix"), "mixing.made"),
        (
            ("mixing.made={ratio: 1}", "algorithm.name=mix", "data.pipeline.experiences=[{name: diversity}]"),
            "mixing.made",
        ),
    ):
        with pytest.raises(JackfieldError) as caught:
            small_run("refused", *settings, *SMALL)
        assert where == caught.value.where
