"""Examples in docstrings run, and what is written about the package is true of it."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

import cupy_moe_ar
from cupy_moe_ar import ops, testing, workspace

ROOT = Path(__file__).parent.parent
FINDER = doctest.DocTestFinder(exclude_empty=True)
EXAMPLES = [
    example
    for module in (ops, testing, workspace)
    for example in FINDER.find(module)
    if example.examples
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example: doctest.DocTest) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    told: list[str] = []
    runner.run(example, out=told.append)
    assert runner.failures == 0, "".join(told)


def test_every_operation_has_an_example() -> None:
    shown = {example.name.rpartition(".")[2] for example in EXAMPLES}
    operations = {name for name in ops.__all__ if name[0].islower() and "plan_" not in name}
    assert len(operations) == 6
    assert operations <= shown


def documented(module: ModuleType) -> list[str]:
    return [name for name in module.__all__ if not (getattr(module, name).__doc__ or "").strip()]


def test_public_names_have_docstrings() -> None:
    assert documented(cupy_moe_ar) == []
    assert documented(importlib.import_module("cupy_moe_ar.testing")) == []


def test_every_variable_is_in_the_list() -> None:
    folders = ("cupy_moe_ar", "scripts", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    text = "".join(path.read_text() for path in files if path.suffix in (".py", ".sh", ""))
    macros = "PRODUCER|PROTOCOL|DTYPE|COMM_DTYPE|WORLD_SIZE|KERNEL_NAME|QUANT"
    used = set(re.findall(rf"\bMOE_AR_(?!(?:{macros})\b)[A-Z][A-Z_]*[A-Z]\b", text))
    assert len(used) > 5
    rows = re.findall(r"^\| `(MOE_AR_\w+)`", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert used - set(rows) == set()


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
