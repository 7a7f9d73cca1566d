"""The golden fixture itself: what it says when a text differs or was never written."""

from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def only_when_comparing(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        pytest.skip("writing golden texts")


def test_same_text_passes_and_other_text_shows_the_difference(
    golden: Callable[[str, str], None],
) -> None:
    golden("golden_fixture", "first line\nsecond line")
    with pytest.raises(pytest.fail.Exception, match=r"\n first line\n-second line\n\+third line"):
        golden("golden_fixture", "first line\nthird line")


def test_missing_text_says_how_to_write_it(golden: Callable[[str, str], None]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"never\.txt does not exist.*--update-golden"):
        golden("never", "text")
