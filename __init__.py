"""Surgery on pretrained Mamba2 models: measured forgetting, Palimpsa-M layers, proved conversions.

The names below are the Python API (`docs/api.md`). Each is imported when it is first used: `import palimpsa_surgery`
alone loads neither torch nor transformers.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "convert": "surgery.convert",
    "diagnose": "surgery.doctor",
    "evaluate": "recipes.evaluation",
    "export": "surgery.export",
    "finetune": "recipes.finetune",
    "generate": "recipes.generation",
    "inspect_checkpoint": "surgery.inspection",
    "load_model": "surgery.loading",
    "make_plan": "surgery.plan",
    "measure": "surgery.forgetting",
    "merge": "recipes.adapters",
    "metaplastic_scan": "kernels.api",
    "metaplastic_step": "kernels.api",
    "metaplasticity_off": "modeling.metaplasticity",
    "open_checkpoint": "surgery.checkpoint",
    "push": "surgery.hub",
    "push_to_folder": "surgery.hub",
    "read_plan": "surgery.plan",
    "read_profile": "surgery.profile",
    "write_plan": "surgery.plan",
    "write_profile": "surgery.profile",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
