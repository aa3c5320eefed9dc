"""The page on fine-tuning says what is there."""

import re
from pathlib import Path

from palimpsa_surgery.recipes.launch import shipped_configs
from palimpsa_surgery.recipes.training.recipe import MODES, load_recipe, shipped_recipes

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "finetuning.md").read_text(encoding="utf-8")


def test_every_recipe_has_its_row_with_its_mode():
    rows = dict(re.findall(r"^\| `([\w.]+)` \| [^|]+ \| ([\w+]+) \|", PAGE, re.MULTILINE))
    assert rows == {name: load_recipe(name).mode for name in shipped_recipes()}


def test_every_mode_and_configuration_is_named():
    assert all(f"| `{mode}` |" in PAGE for mode in MODES)
    assert all(f"`{name}`" in PAGE for name in shipped_configs())
