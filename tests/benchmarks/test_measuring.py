import csv

import pytest
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint

measuring = pytest.importorskip("measuring")

TINY = {
    "nemotron_h": {
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8},
        **{"num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16},
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
    },
    "bamba": {
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16},
        **{"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    },
    "mamba2": {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_heads": 4,
        "head_dim": 8,
        "n_groups": 2,
        "num_hidden_layers": 4,
    },
}


@pytest.mark.parametrize("layers", [None, 3])
@pytest.mark.parametrize("model_type", TINY)
def test_what_is_written_is_a_checkpoint_of_so_many_layers(tmp_path, model_type, layers):
    written = measuring.write_checkpoint(tmp_path / "source", model_type, TINY[model_type], layers)
    checkpoint = open_checkpoint(tmp_path / "source")
    assert checkpoint.num_layers == written == (layers or 4)
    assert {str(entry.dtype) for entry in checkpoint.tensors.values()} == {"torch.bfloat16"}
    for site in checkpoint.sites.values():
        assert checkpoint.load(site.tensor("dt_bias")).mean() < -3


def test_a_row_is_added_for_each_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measuring, "run", lambda command: measuring.Measurement(1.0, 0.5, 7))
    monkeypatch.setattr(measuring, "SHAPES", {"tiny": ("mamba2", TINY["mamba2"])})
    for tokens in (64, 32):
        arguments = ["--shape", "tiny", "--tokens", str(tokens), "--work", str(tmp_path), "-o", str(tmp_path / "o.csv")]
        monkeypatch.setattr("sys.argv", ["measuring.py", *arguments])
        measuring.main()
    rows = list(csv.DictReader((tmp_path / "o.csv").open()))
    assert [(row["tokens"], row["layers"], row["peak_rss_anon"]) for row in rows] == [
        ("64", "4", "7"),
        ("32", "4", "7"),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["o.csv"]
