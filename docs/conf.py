"""Sphinx: the settings, and the pages of the API reference, which are written from the modules that are there."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import jackfield

DOCS = Path(__file__).resolve().parent

project = "Jackfield"
author = "the Jackfield developers"
project_copyright = "the Jackfield developers; Apache-2.0"
version = release = jackfield.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Jackfield"
nitpicky = False
# Pages join by being there; `ref.python`: a short name in a docstring may be re-exported by a package, too.
suppress_warnings = ["toc.empty_glob", "ref.python"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def public_modules(package: str = "jackfield") -> list[str]:
    """The modules of the API reference.

    A package stands for what it exports; only some packages that export nothing of their submodules, and those whose
    submodules are a contract each, are shown by submodule.
    """
    found = importlib.import_module(package)
    names = [package]
    for each in pkgutil.iter_modules(found.__path__):
        name = f"{package}.{each.name}"
        if each.name.startswith("_") or each.name in {"cli"}:
            continue
        names.append(name)
        if name in ("jackfield.abc", "jackfield.sdk", "jackfield.trainer"):
            inner = [found.name for found in pkgutil.iter_modules(importlib.import_module(name).__path__)]
            names += [f"{name}.{each}" for each in inner]
        if name == "jackfield.plugins":
            names.append(f"{name}.hooks")
    return sorted(names)


def write_api_pages() -> None:
    """Write ``reference/api/MODULE.rst`` where it is not what it should be; remove pages of modules that are gone."""
    folder = DOCS / "reference" / "api"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {f"{name}.rst": page(name) for name in (*public_modules(), *public_modules("jackfield_huggingface"))}
    for file in folder.glob("*.rst"):
        if file.name not in wanted:
            file.unlink()
    for name, text in wanted.items():
        file = folder / name
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def page(module: str) -> str:
    """The page of one module, in reStructuredText."""
    return f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n"


write_api_pages()
