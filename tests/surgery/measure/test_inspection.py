"""What inspecting says, as a table and as strict JSON, without running the model."""

import json
import math

import pico
import pytest
import torch
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.measure.inspection import LAYER_HEADERS, inspect_checkpoint


@pytest.fixture
def converted(tmp_path):
    tensors = pico.write_hf(tmp_path / "model", swapped=(1,), config={"norm_before_gate": True})
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "README.md").write_text("---\nlicense: mit\n---\n")
    return tensors, inspect_checkpoint(open_checkpoint(tmp_path / "model"))


def test_counts_add_up(converted):
    tensors, found = converted
    stored = [tensor for name, tensor in tensors.items() if name != "lm_head.weight"]
    assert found.parameters == sum(tensor.numel() for tensor in stored)
    assert found.bytes == sum(tensor.nbytes for tensor in stored)
    assert found.dtypes == {"bfloat16": found.parameters - 8, "float32": 8}
    outside = tensors["backbone.embeddings.weight"].numel() + 16
    assert sum(layer.parameters for layer in found.layers) == found.parameters - outside


def test_what_lies_in_the_folder_is_said(converted):
    _, found = converted
    assert (found.layout, found.source, found.license, found.tied) == ("palimpsa_mamba2", "model", "mit", True)
    assert (found.tokenizer_files, found.files) == (("tokenizer.json",), ("model.safetensors",))
    assert found.swapped_layers == (1,)
    assert found.swapped_geometry == {"beta_rank": 2, "beta_groups": 8, "beta_scale_form": "abs", "train_prior": True}
    assert found.dropped[0][0] == "lm_head.weight"
    assert "norm_before_gate" in found.warnings[0]


@pytest.mark.parametrize("limit", [[0.0, None], [0.05, 0.2]])
def test_static_figures_follow_from_the_two_tensors(tmp_path, limit):
    tensors = pico.write_hf(tmp_path, config={"time_step_limit": limit})
    found = inspect_checkpoint(open_checkpoint(tmp_path))
    low, high = limit[0], math.inf if limit[1] is None else limit[1]
    for layer, figures in enumerate(found.layers):
        prefix = f"backbone.layers.{layer}.mixer."
        rates = []
        for a_log, bias in zip(tensors[prefix + "A_log"].tolist(), tensors[prefix + "dt_bias"].tolist(), strict=True):
            rates.append(math.exp(a_log) * min(max(math.log1p(math.exp(bias)), low), high))
        windows = [1 / (1 - math.exp(-rate)) for rate in rates]
        assert figures.layer == layer
        assert math.isclose(figures.static_rate, sum(rates) / len(rates), rel_tol=1e-4)
        assert math.isclose(figures.static_window, sum(windows) / len(windows), rel_tol=1e-4)


def test_it_is_strict_json_and_labeled_static(converted):
    _, found = converted
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert content["schema_version"] == 1
    assert content["figures"] == "static"
    assert content["geometry"]["time_step_limit"] == [0.0, None]
    assert content["layers"][1]["swapped"] is True
    assert set(content["layers"][0]) == {"layer", "swapped", "static_rate", "static_window", "parameters"}


def test_no_path_of_this_machine_is_in_it(tmp_path):
    pico.write_mamba_ssm(tmp_path / "model")
    assert str(tmp_path) not in json.dumps(inspect_checkpoint(open_checkpoint(tmp_path / "model")).to_dict())


def test_the_tables(converted):
    _, found = converted
    facts = dict(found.rows())
    assert facts["swapped layers"] == "1"
    assert facts["heads"] == "4 of 8, in 1 group"
    assert facts["vocabulary"] == "32 rows, head tied to the embedding"
    assert facts["not used"].startswith("lm_head.weight: ")
    assert "warning" in facts
    assert "bfloat16" in facts["parameters"]
    assert "float32" in facts["parameters"]
    rows = found.layer_rows()
    assert [row[1] for row in rows] == ["Mamba2", "Palimpsa-M", "Mamba2"]
    assert all(len(row) == len(LAYER_HEADERS) for row in rows)
    assert all("static" in header for header in LAYER_HEADERS[2:])


def test_a_bare_folder_says_what_is_absent(tmp_path):
    pico.write_mamba_ssm(tmp_path, tied=False, dtype=torch.float32)
    facts = dict(inspect_checkpoint(open_checkpoint(tmp_path)).rows())
    assert facts["tokenizer"] == "none in the folder"
    assert facts["license"] == "not stated"
    assert facts["swapped layers"] == "none"
    assert "matrix of its own" in facts["vocabulary"]
