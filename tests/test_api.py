"""The Python API: each name of the package resolves, is documented, and has the signature that the page shows."""

import inspect
import re
from pathlib import Path

import palimpsa_surgery
import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
NAMES = [name for name in palimpsa_surgery.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_a_callable_with_a_docstring(name):
    found = getattr(palimpsa_surgery, name)
    assert callable(found)
    assert inspect.getdoc(found)
    assert getattr(palimpsa_surgery, name) is found


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_on_the_page_with_parameters_it_has(name):
    shown = re.search(rf"`{name}\(([^`]*)\)`", PAGE)
    assert shown, f"docs/api.md does not show {name}"
    real = inspect.signature(getattr(palimpsa_surgery, name)).parameters
    for part in re.split(r",\s*(?![^(]*\))", shown.group(1)):
        argument, _, default = part.strip().partition("=")
        if argument in ("*", "...", ""):
            continue
        assert argument in real, f"{name} has no parameter {argument}"
        if default:
            assert repr(real[argument].default) == default.replace('"', "'"), f"{name}: {argument}"


def test_an_unknown_name_says_which_exist():
    with pytest.raises(AttributeError, match=r"has no attribute 'convrt'; it has .*convert"):
        palimpsa_surgery.convrt  # noqa: B018
    assert set(NAMES) <= set(dir(palimpsa_surgery))
