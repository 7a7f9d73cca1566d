"""docs/integrations.md, which a script writes, names tests that are there."""

import ast
import functools
import re

from conftest import ROOT

PAGE = ROOT / "docs" / "integrations.md"
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)")


@functools.cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_row_names_tests_that_are_there() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "| yes |" in line]
    assert rows
    for row in rows:
        named = TEST.findall(row)
        assert named, row
        for path, name in named:
            assert name in functions_of(path), f"{path} has no {name}"
