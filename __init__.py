"""Surgery on pretrained Mamba2 models: measured forgetting, Palimpsa-M layers, proved conversions.

The names below are the Python API (`docs/api.md`). Each is imported when it is first used: `import palimpsa_surgery`
alone loads neither torch nor transformers.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "convert": "surgery.conversion.convert",
    "diagnose": "doctor",
    "evaluate": "recipes.evaluation.evaluate",
    "export": "surgery.conversion.export",
    "finetune": "recipes.training.finetune",
    "generate": "recipes.evaluation.generation",
    "inspect_checkpoint": "surgery.measure.inspection",
    "load_model": "surgery.checkpoint.loading",
    "make_plan": "surgery.planning.plan",
    "measure": "surgery.measure.forgetting",
    "merge": "recipes.training.adapters",
    "metaplastic_scan": "kernels.metaplastic.scan",
    "metaplastic_step": "kernels.metaplastic.scan",
    "metaplasticity_off": "mixers.metaplasticity",
    "open_checkpoint": "surgery.checkpoint.checkpoint",
    "push": "sharing.hub",
    "push_to_folder": "sharing.hub",
    "read_plan": "surgery.planning.plan",
    "read_profile": "surgery.measure.profile",
    "write_plan": "surgery.planning.plan",
    "write_profile": "surgery.measure.profile",
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
