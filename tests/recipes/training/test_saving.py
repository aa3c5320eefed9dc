"""What lies beside the weights of a saved model."""

import pico
import pytest
import yaml
from palimpsa_surgery.recipes.training.saving import save_tensors
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.conversion.card import MARKER


@pytest.mark.parametrize("write", [pico.write_mamba_ssm, pico.write_hf])
def test_a_plain_source_keeps_its_license_in_a_card_of_ours(tmp_path, write):
    write(tmp_path / "source")
    (tmp_path / "source" / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: bob/base\n---\nits words\n")
    checkpoint = open_checkpoint(tmp_path / "source")
    save_tensors(checkpoint, tmp_path / "final", checkpoint.load, "source")
    card = (tmp_path / "final" / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert (metadata["license"], metadata["base_model"]) == ("apache-2.0", "bob/base")
    assert MARKER in card
    assert "its words" not in card
    assert open_checkpoint(tmp_path / "final").license == "apache-2.0"


def test_a_converted_source_hands_on_what_it_has(tmp_path):
    pico.write_hf(tmp_path / "source", swapped=(1,), config={"time_step_limit": [0.0, None]})
    for name, text in {"README.md": "mine", "plan.yaml": "plan", "tokenizer_config.json": "{}"}.items():
        (tmp_path / "source" / name).write_text(text)
    checkpoint = open_checkpoint(tmp_path / "source")
    save_tensors(checkpoint, tmp_path / "final", checkpoint.load, "source")
    for path in (tmp_path / "source").iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            assert (tmp_path / "final" / path.name).read_bytes() == path.read_bytes()
