"""README.md of an adapter: what it belongs to and how it is put on its base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..surgery.checkpoint.licenses import license_names, license_terms
from ..surgery.conversion.card import MARKER, TAGS, front_matter
from .evaluation_card import CardEvaluation


def render_adapter_card(
    name: str,
    base: str,
    swapped: Sequence[int],
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
    training: Sequence[str],
    evaluation: CardEvaluation | None,
) -> str:
    """The text of an adapter's README.md, front matter included.

    Args:
        name: Hub id of the adapter.
        base: Hub id of its base.
        swapped: the base's swapped layers.
        config: content of `adapter_config.json`.
        metadata: of a card that is there already; its license is kept. The base's own card has the base's.
        training: lines on how it was trained.
        evaluation: figures, if there are any.
    """
    named = license_names(metadata)
    targets = ", ".join(f"`{target}`" for target in sorted(config.get("target_modules") or []))
    whole = ", ".join(f"`{module}`" for module in config.get("modules_to_save") or [])
    kept = (
        f" The new parameters ({whole}) of its swapped layers ({_numbers(swapped)}) are stored whole." if whole else ""
    )
    parts = [
        front_matter(
            name,
            evaluation.results() if evaluation else (),
            license=named,
            **(license_terms(metadata) if named else {}),
            base_model=base,
            base_model_relation="adapter",
            library_name="peft",
            pipeline_tag="text-generation",
            tags=[*TAGS, "lora"],
        ),
        MARKER,
        "",
        f"# {name}",
        "",
        f"A low-rank adapter (rank {config.get('r')}, alpha {config.get('lora_alpha')}, on {targets}) for `{base}`, "
        f"whose card says what kind of model that is.{kept}",
        "",
    ]
    if training:
        parts += ["## Training", "", *(f"- {line}" for line in training), ""]
    if evaluation is not None:
        parts += ["## Evaluation", "", evaluation.table(), ""]
    parts += ["## Use", "", _usage(name, base), "", "## License", "", f"That of `{base}` applies.", ""]
    return "\n".join(parts)


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(str(layer) for layer in layers)


def _usage(name: str, base: str) -> str:
    return (
        "```python\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n"
        "\n"
        f'base = AutoModelForCausalLM.from_pretrained("{base}", trust_remote_code=True)\n'
        f'model = PeftModel.from_pretrained(base, "{name}")\n'
        "```\n"
        "\n"
        "With `palimpsa-surgery` installed, `palimpsa merge ADAPTER_FOLDER OUT` makes one model of both."
    )
