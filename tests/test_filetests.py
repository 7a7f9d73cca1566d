"""Each test in the files of ``filetests``: its passes give the text that it says, or the error."""

from dataclasses import replace
from pathlib import Path

import pytest
from filetests import FOLDER, FileTest
from programs import random_program

from lazyinline import LazyInlineError
from lazyinline.reuse.ir.printer import diff_texts
from lazyinline.reuse.ir.program import UserInput

CASES = [
    pytest.param(path, index, id=f"{path.stem}: {test.title}")
    for path in sorted(FOLDER.glob("*.txt"))
    for index, test in enumerate(FileTest.read(path))
]


@pytest.mark.parametrize(("path", "index"), CASES)
def test_passes_give_what_the_file_says(
    path: Path, index: int, request: pytest.FixtureRequest
) -> None:
    test = FileTest.read(path)[index]
    assert test.error or test.check or test.executes, "a file test expects something"
    if test.error:
        with pytest.raises(LazyInlineError) as refused:
            test.text()
        assert test.error in str(refused.value).partition("\n")[0]
        return
    text = test.text()
    if not test.check:
        return
    if request.config.getoption("--update-golden"):
        test.write(path, index, text)
    elif text != test.expected:
        pytest.fail(diff_texts(test.expected, text), pytrace=False)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("recompute", ["recompute", "recompute=full", "recompute=selective"])
@pytest.mark.sweep(keep=["full-0", "full-3", "full-5", "selective-7"])
def test_random_programs_give_what_pytorch_gives_after_each_pass(recompute: str, seed: int) -> None:
    passes = [(name, option) for name, _, option in [recompute.partition("=")]]
    passes = [("autodiff", ""), *passes, ("decompose", ""), ("lower", ""), ("link", "")]
    program = random_program(seed, structs=False)
    sources = [UserInput(i, v.hint, True) for i, v in enumerate(program.inputs)]
    text = str(replace(program, sources=tuple(sources)))
    FileTest(text, passes, executes=True, error="", check="", expected="").text()
