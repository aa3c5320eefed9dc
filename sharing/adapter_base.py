"""Whether the base that a push names for an adapter is the model that the adapter fits, as far as can be seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..base.errors import CheckpointError, UsageError
from ..base.network import check_network
from ..base.schemas import read_model
from ..recipes.training.adapter_files import SOURCE, AdapterSource, read_adapter_tensors
from ..surgery.checkpoint.sources import read_foreign_json

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_base(adapter: Path, base: str, token: str | None = None) -> str:
    """Compares an adapter with its base on the Hub, weights not fetched; returns the sentence on what was compared.

    The Hub knows the sha256 of a large file, and so does the adapter of the files that it was trained on.

    Args:
        adapter: adapter folder.
        base: Hub id.
        token: Hub token; by default the stored one.

    Raises:
        UsageError: no Hub id, or nothing of that name that the token may read.
        CheckpointError: other layers are swapped there, or its sizes or its weights files are others.
    """
    if not _HUB_ID.fullmatch(base):
        raise UsageError(f"--base {base}: is no Hub id, expected owner/name; push the base first and give its name")
    config, digests, reason = _fetched(base, token)
    if config is None:
        return f"--base {base}: was not looked at ({reason}), so whether the adapter fits it was not checked"
    source = read_model(AdapterSource, adapter / SOURCE) if (adapter / SOURCE).is_file() else None
    theirs = sorted(config.get("palimpsa_layers") or [])
    if source is not None and theirs != sorted(source.palimpsa_layers):
        raise CheckpointError(
            f"--base {base}: is not the model that the adapter was trained on: its layers {theirs} are swapped, "
            f"expected {sorted(source.palimpsa_layers)}; give that model"
        )
    _compare_sizes(base, config, read_adapter_tensors(adapter))
    if source is None or not source.weights or not digests:
        return f"--base {base}: its swapped layers and sizes fit the adapter; its weights were not compared"
    if not digests.issuperset(source.weights):
        raise CheckpointError(
            f"--base {base}: has other weights than the model that the adapter was trained on ({source.base}), though "
            "of the same sizes; push that model, and give its name"
        )
    return f"--base {base}: its weights are those that the adapter was trained on"


def _fetched(base: str, token: str | None) -> tuple[dict[str, Any] | None, set[str], str]:
    """The content of a repository's config.json, and the sha256 of its large files; None and the reason where they
    cannot be looked at."""
    import httpx
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub import errors as hub

    check_network(token)
    try:
        config = read_foreign_json(Path(hf_hub_download(base, "config.json", token=token)))
        large = (getattr(file, "lfs", None) for file in HfApi(token=token).list_repo_tree(base))
        return config, {file.sha256 for file in large if file is not None}, ""
    except hub.GatedRepoError:
        return None, set(), "it is gated"
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        raise UsageError(
            f"--base {base}: is no model on the Hub that you may read; push it first, check the spelling, or log in"
        ) from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled):
        return None, set(), "the Hub cannot be reached"
    except hub.EntryNotFoundError:
        return None, set(), "it has no config.json"
    except (hub.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        return None, set(), type(error).__name__


def _compare_sizes(base: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    width = config.get("hidden_size", config.get("d_model"))
    depth = config.get("num_hidden_layers", config.get("n_layer"))
    for name, tensor in tensors.items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if isinstance(depth, int) and layer and int(layer.group(1)) >= depth:
            raise CheckpointError(
                f"--base {base}: has {depth} layers, and the adapter holds {name}; give the model it was trained on"
            )
        side = 1 if "in_proj.lora_A" in name else 0 if "out_proj.lora_B" in name else None
        if isinstance(width, int) and side is not None and tensor.shape[side] != width:
            raise CheckpointError(
                f"--base {base}: is {width} wide, and the adapter's {name} is for {tensor.shape[side]}; give the model "
                "it was trained on"
            )
