"""A source's license, whatever its form, is in all that is made of the source: names in the card, texts beside it."""

import pico
import pytest
import yaml
from palimpsa_surgery.recipes.training.saving import save_tensors
from palimpsa_surgery.sharing.hub import push_to_folder
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.conversion.convert import convert
from palimpsa_surgery.surgery.conversion.export import export

CARD = """---
license: [mit, other]
license_name: odd
license_link: TERMS.txt
---
# A model
"""
TEXTS = {"TERMS.txt": "all of it", "LICENCE-code": "MIT", "NOTICE": "of whom", "license.md": "small"}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    pico.write_hf(folder)
    (folder / "README.md").write_text(CARD)
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def converted(source, out):
    convert(source, out, layers=[1])


MAKERS = {
    "convert": converted,
    "export": lambda source, out: export(source, out),
    "fine-tuned": lambda source, out: save_tensors(
        open_checkpoint(source), out, open_checkpoint(source).load, "source"
    ),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_names_and_texts_come_along(maker, source, tmp_path):
    out = tmp_path / "out"
    MAKERS[maker](source, out)
    assert {name: (out / name).read_text() for name in TEXTS} == TEXTS
    metadata = yaml.safe_load((out / "README.md").read_text().split("---")[1])
    assert metadata["license"] == ["mit", "other"]
    assert metadata["license_link"] == "TERMS.txt"


def test_a_push_carries_them_on(source, tmp_path):
    converted(source, tmp_path / "model")
    push_to_folder(tmp_path / "model", "me/model", tmp_path / "upload")
    assert {name: (tmp_path / "upload" / name).read_text() for name in TEXTS} == TEXTS
    metadata = yaml.safe_load((tmp_path / "upload" / "README.md").read_text().split("---")[1])
    assert metadata["license"] == ["mit", "other"]
