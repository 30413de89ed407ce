"""Files in, files out: formats, what is set aside, what is refused, and what a failure leaves."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from jackfield.cli import main
from jackfield.errors import ConfigError, DataError, JackfieldError
from jackfield_formatter import FormatSettings, SftRow, TaskRow, format_file, read_rows

from .conftest import Form, Write, cli, lines_of

RECORDS = [{"question": f"{n} + 1?", "answer": f"So\n#### {n + 1}"} for n in range(40)]
EXPECTED = [(f"raw:{n + 1}", f"{n} + 1?", str(n + 1)) for n in range(40)]


def in_parquet(file: Path) -> Path:
    parquet.write_table(pa.Table.from_pylist(RECORDS), file.with_suffix(".parquet"))
    return file.with_suffix(".parquet")


def in_csv(file: Path) -> Path:
    with file.with_suffix(".csv").open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, ["question", "answer"])
        writer.writeheader()
        writer.writerows(RECORDS)
    return file.with_suffix(".csv")


def in_json(file: Path) -> Path:
    file.with_suffix(".json").write_text(json.dumps(RECORDS))
    return file.with_suffix(".json")


def in_lines(file: Path) -> Path:
    zipped = file.with_name("raw.jsonl.gz")
    zipped.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in RECORDS).encode()))
    return zipped


def in_folder(file: Path) -> Path:
    datasets.Dataset.from_list(RECORDS).save_to_disk(file)
    return file


@pytest.mark.parametrize("make", [in_parquet, in_csv, in_json, in_lines, in_folder])
def test_every_format_gives_the_same_rows(form: Form, tmp_path: Path, make: Any) -> None:
    report, _ = form(make(tmp_path / "raw"), "task")
    rows = [(row.id, row.prompt, row.ground_truth) for row in read_rows(tmp_path / "out.jsonl", TaskRow)]
    assert EXPECTED == rows
    assert (40, 40, 0, None) == (report.read, report.rows, report.set_aside, report.set_aside_file)


def test_texts_become_pieces(form: Form, tmp_path: Path) -> None:
    """A text file, a folder of them, and a column `text`; each piece has the one before it as its prompt."""
    (folder := tmp_path / "corpus").mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text("\n\n".join(f"{name} paragraph {n}." for n in range(10)))
    report, lines = form(folder, "sft", size=40)
    assert (2, len(lines)) == (report.read, report.rows)
    for name in ("a", "b"):
        own = [line for line in lines if name == line["data_source"]]
        assert (folder / f"{name}.txt").read_text() == "".join(line["completion"] for line in own)
        assert all(len(line["completion"]) <= 40 for line in own)
        assert ["Continue the text:"] + [
            f"Continue the text:\n\n{line['completion']}".strip() for line in own[:-1]
        ] == [line["prompt"] for line in own]
    assert len(lines) == len({line["id"] for line in lines})
    assert (
        lines[0]["completion"] == form([{"text": (folder / "a.txt").read_text()}], "sft", size=40)[1][0]["completion"]
    )


def test_a_large_text_is_read_in_parts(form: Form, tmp_path: Path) -> None:
    """Parts end with a paragraph, so no word is cut."""
    words = [f"word{n:07}" for n in range(200_000)]
    file = tmp_path / "long.txt"
    file.write_text("\n\n".join(" ".join(words[at : at + 100]) for at in range(0, len(words), 100)))
    report, lines = form(file, "sft", size=50_000)
    assert report.read > 1
    assert words == [word for line in lines for word in line["completion"].split()]


def test_bad_records_are_set_aside_with_row_and_reason(write: Write, tmp_path: Path) -> None:
    """Each is in a file beside the output, with its number, what was expected and found, and the record."""
    records: list[Any] = [*RECORDS, {"question": 3, "answer": "#### 1"}, ["no", "object"], {"answer": "#### 2"}]
    file, out = write(records), tmp_path / "out.jsonl"
    with file.open("a") as opened:
        opened.write("no JSON\n\n")
    done = cli(file, out, "--as", "task", "--json")
    assert 0 == done.exit_code, done.output
    report = json.loads(done.output)
    assert (44, 40, 4) == (report["read"], report["rows"], report["set_aside"])
    aside = lines_of(Path(report["set_aside_file"]))
    assert [41, 42, 43, 44] == [each["number"] for each in aside]
    assert [f"{file}:{n}" for n in (41, 42, 43, 44)] == [each["where"].split(" ")[0] for each in aside]
    assert "'question'" in aside[0]["message"]
    assert ("a text, or a list of messages", "int") == (aside[0]["expected"], aside[0]["found"])
    assert records[40] == aside[0]["record"]
    assert "'question'" in aside[2]["message"]
    assert "no JSON\n" == aside[3]["record"]
    shown = cli(file, out, "--as", "task", "--replace").output
    assert f"set aside: 4 records; {report['set_aside_file']} says why" in shown


@pytest.mark.parametrize("name", ["raw.jsonl", "link.jsonl", "raw.set_aside.jsonl"])
def test_the_source_is_not_replaced(tmp_path: Path, name: str) -> None:
    """Not by its own name, not through a link, and not as a file beside the output."""
    file = tmp_path / ("raw.jsonl" if name != "raw.set_aside.jsonl" else name)
    file.write_text('{"question": "1?", "answer": "1"}\n')
    (tmp_path / "link.jsonl").symlink_to(file)
    before = file.read_bytes()
    done = CliRunner().invoke(
        main, ["data", "format", str(file), str(tmp_path / name.replace(".set_aside", "")), "--as", "task", "--replace"]
    )
    assert 0 != done.exit_code
    assert "config.invalid-value" in done.output
    assert before == file.read_bytes()


@pytest.mark.parametrize(
    ("bad", "share", "fails"), [(20, 0.0, False), (21, 0.5, False), (21, 0.1, True), (21, 1, False)]
)
def test_too_many_bad_records_are_an_error(form: Form, tmp_path: Path, bad: int, share: float, fails: bool) -> None:
    """The first 20 are free, then the share counts, wherever they are; without an output, the reasons are there."""
    records: list[Any] = [{"question": 0}] * bad + RECORDS
    records.sort(key=lambda each: "answer" not in each)
    for order in (records, records[::-1]):
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        if not fails:
            assert 40 == form(order, "task", share=share, shape="layouts")[0].rows
            continue
        with pytest.raises(DataError) as caught:
            form(order, "task", share=share)
        assert "data.set-aside" == caught.value.code
        assert f"{bad} of {bad + 40}" in caught.value.message
        assert "raw.jsonl" in str(caught.value.found)
        assert not (tmp_path / "out.jsonl").exists()
        assert bad == len(lines_of(tmp_path / "out.set_aside.jsonl"))


def test_a_source_of_which_nothing_can_be_read_ends_early(form: Form, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        form([{"question": "?", "answer": None}] * 5000, "sft")
    assert "data.set-aside" == caught.value.code
    assert 1001 == len(lines_of(tmp_path / "out.set_aside.jsonl"))


def test_nothing_is_replaced_by_a_failure(form: Form, write: Write, tmp_path: Path) -> None:
    """The output is there as it was, until a whole one takes its place."""
    _, before = form(RECORDS, "task")
    with pytest.raises(DataError):
        form([{"question": "?"}] * 2, "sft")
    assert before == lines_of(tmp_path / "out.jsonl")
    damaged = write(RECORDS, "raw.json")
    damaged.write_text(json.dumps(RECORDS)[:-40])
    with pytest.raises(DataError) as caught:
        form(damaged, "task")
    assert f"{damaged}:40" == str(caught.value.where)
    assert before == lines_of(tmp_path / "out.jsonl")
    assert not [*tmp_path.glob(".*")]
    done = cli(write(RECORDS), tmp_path / "out.jsonl", "--as", "task")
    assert 1 == done.exit_code
    assert "--replace" in done.output
    assert before == lines_of(tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("source", "out", "code"),
    [
        ("absent.jsonl", "out.jsonl", "data.missing"),
        ("raw.jsonl", "out.json", "config.invalid-value"),
        ("raw.xml", "out.jsonl", "data.missing"),
        ("empty.jsonl", "out.jsonl", "data.empty"),
    ],
)
def test_files_that_cannot_be_used(write: Write, tmp_path: Path, source: str, out: str, code: str) -> None:
    write(RECORDS), write([], "empty.jsonl"), write([], "raw.xml")
    with pytest.raises(JackfieldError) as caught:
        format_file(tmp_path / source, tmp_path / out, FormatSettings(into="task"))
    assert code == caught.value.code
    assert {"raw.jsonl", "empty.jsonl", "raw.xml"} == {each.name for each in tmp_path.iterdir()}


def test_the_manifest_says_what_rows_were_made_from(form: Form, tmp_path: Path) -> None:
    form(RECORDS, "task")
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert ("jackfield.task/1", 40, 0) == (manifest["schema"], manifest["rows"], manifest["set_aside"])
    assert str(tmp_path / "raw.jsonl") == manifest["source"]["path"]
    assert "task" == manifest["settings"]["into"]


def test_settings_that_contradict_each_other(write: Write, tmp_path: Path) -> None:
    for options in (
        ("--function", "a.py:b", "--map", "prompt=q"),
        ("--function", "a.py:b", "--shape", "texts"),
        ("--unit", "tokens"),
        ("--map", "prompt"),
        ("--log-probs",),
    ):
        done = cli(write(RECORDS), tmp_path / "out.jsonl", "--as", "sft", *options)
        assert done.exit_code, options
        assert "[config." in done.output, done.output
    with pytest.raises(ConfigError):
        FormatSettings(into="experience", log_probs=True)
    assert [] == [*read_rows(write([], "none.jsonl"), SftRow)]
