"""Every example is run by a test in CI, or listed here with the reason why not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
SUFFIXES = {".py", ".yaml", ".sh", ".ipynb", ".sql", ".json", ".jsonl", ".csv"}

#: Examples that no test in CI runs.
NOT_IN_CI = {
    "real_model/gpu_grpo.yaml": "needs a GPU and a model from the Hub; CI checks its settings",
    "real_model/gpu_sft.yaml": "needs a GPU and a model from the Hub; CI checks its settings",
}


def examples() -> dict[str, str]:
    """The text of each file by its path; of a package only that of its project."""
    packages = [file.parent for file in EXAMPLES.rglob("pyproject.toml")]
    found = {str(package.relative_to(EXAMPLES)): "" for package in packages}
    for file in sorted(EXAMPLES.rglob("*")):
        if file.suffix in SUFFIXES and "__pycache__" not in file.parts and not {*packages} & {*file.parents}:
            found[str(file.relative_to(EXAMPLES))] = file.read_text(encoding="utf-8")
    return found


def in_ci(source: str) -> str:
    """A test file without what only the night runs, and without comments."""
    tree = ast.parse(source)
    if any("mark.nightly" in ast.unparse(each) for each in tree.body if ast.unparse(each).startswith("pytestmark")):
        return ""
    tree.body = [each for each in tree.body if "@pytest.mark.nightly" not in ast.unparse(each).splitlines()]
    return ast.unparse(tree)


def modules_of_tests() -> Iterator[str]:
    """Find the test files that speak of examples."""
    for folder in (REPOSITORY / "tests", *REPOSITORY.glob("plugins/*/*/tests")):
        for file in folder.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if file != Path(__file__) and re.search("examples|QUICKSTART", text):
                yield text


def names(text: str, file: str) -> bool:
    """Say whether a text names a file and the folder of its example."""
    path = Path(file)
    folder = rf"\b{path.parts[0]}\b"
    name = rf"(?<![\w-]){re.escape(path.name)}\b|[\"']{re.escape(path.stem)}[\"']"
    return bool(re.search(folder, text, re.IGNORECASE) and re.search(name, text))


def run_by(texts: list[str], known: dict[str, str]) -> set[str]:
    """Find the examples that texts name, and the files that these use in turn."""
    found = {file for file in known if any(names(text, file) for text in texts)}
    while True:
        used = {user: f"{Path(user).parts[0]}\n{known[user]}" for user in found}
        imported = {
            (Path(user).parent, module)
            for user, text in used.items()
            for module in re.findall(r"^\s*from (\w+) import", text, re.M)
        }
        more = {
            file
            for file in known.keys() - found
            if (Path(file).parent, Path(file).stem) in imported or any(names(text, file) for text in used.values())
        }
        if not more:
            return found
        found |= more


def test_every_example_is_run_in_ci_or_has_a_reason() -> None:
    known = examples()
    followed = [page.read_text(encoding="utf-8") for page in (REPOSITORY / "docs" / "tutorials").glob("*.md")]
    texts = [*map(in_ci, modules_of_tests())]
    assert NOT_IN_CI.keys() == known.keys() - run_by([*texts, *followed], known)


def test_an_example_that_no_test_names_is_found() -> None:
    """A name in a comment, in a test of the night or without its folder does not count."""
    known = {"game/play.py": "from rules import win", "game/rules.py": "", "other/play.py": ""}
    assert {"game/play.py", "game/rules.py"} == run_by(["run('game', 'play.py')"], known)
    assert set() == run_by([in_ci("# game/play.py\n")], known)
    assert set() == run_by([in_ci("@pytest.mark.nightly\ndef test_it():\n    run('game/play.py')\n")], known)
