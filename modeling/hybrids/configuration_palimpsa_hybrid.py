"""Configs of hosts with swapped layers: the host's own config class, a `model_type` of its own, and five keys.

The classes are made when they are asked for, as attributes of this module too: `PalimpsaBambaConfig`. A release of
transformers that lacks a host has no class for it, and the others.
"""

from __future__ import annotations

from functools import cache

from huggingface_hub.dataclasses import strict
from transformers import __version__
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, PreTrainedConfig

from ...base.errors import UsageError
from ...mixers.geometry import GateSpec
from .hosts import HOSTS, PREFIX, gate_channels, mixer_paths


def known_hosts() -> tuple[str, ...]:
    """The hosts that this release of transformers has, by `model_type`."""
    return tuple(host for host in HOSTS if host in CONFIG_MAPPING)


def host_config_class(host: str) -> type[PreTrainedConfig]:
    """The host's own config class.

    Args:
        host: a key of `HOSTS`.

    Raises:
        UsageError: it is none, or this release of transformers lacks it.
    """
    if host not in known_hosts():
        raise UsageError(
            f"{host!r}: transformers {__version__} has no model of this type whose mixers can be swapped; "
            f"expected one of {', '.join(known_hosts())}"
        )
    return CONFIG_MAPPING[host]


@cache
def config_class(host: str) -> type[PreTrainedConfig]:
    """The config class of a host with swapped layers, `PalimpsaBambaConfig` for "bamba".

    Args:
        host: a key of `HOSTS`.

    Raises:
        UsageError: as `host_config_class`. The class raises it for a key whose value the mixers cannot have.
    """
    base = host_config_class(host)

    @strict
    class Config(base):
        model_type = f"{PREFIX}{host}"

        palimpsa_layers: list[int] | tuple[int, ...] | None = None
        beta_rank: int | None = None
        beta_groups: int | None = None
        beta_scale_form: str = "abs"
        train_prior: bool = True

        def __post_init__(self, **kwargs):
            super().__post_init__(**kwargs)
            self.palimpsa_layers = _checked_layers(self)
            channels = gate_channels(self)
            gate = GateSpec.complete(self.hidden_size, channels, **{key: getattr(self, key) for key in GateSpec.KEYS})
            for key, fault in gate.misfits(self.hidden_size, channels):
                raise UsageError(f"config: {key}: {fault}")
            for key, value in gate.keys().items():
                setattr(self, key, value)

        @property
        def gate(self) -> GateSpec:
            """The importance gate of every swapped layer."""
            return GateSpec.of(self)

    Config.__name__ = Config.__qualname__ = f"Palimpsa{base.__name__}"
    Config.__doc__ = f"`{base.__name__}`, of a model in which the mixers of `palimpsa_layers` are swapped."
    return Config


def _checked_layers(config: PreTrainedConfig) -> list[int]:
    """Sorted layer indices; `UsageError` for one that is there twice or has no mixer."""
    chosen, known = sorted(config.palimpsa_layers or ()), mixer_paths(config)
    strange = [layer for layer in chosen if layer not in known]
    if strange:
        raise UsageError(
            f"config: palimpsa_layers names {', '.join(map(str, strange))}; this model has mixers in the layers "
            f"{', '.join(map(str, known))}"
        )
    if len(set(chosen)) != len(chosen):
        raise UsageError(f"config: palimpsa_layers names a layer twice ({chosen}); name each once")
    return chosen


def __getattr__(name: str):
    for host in known_hosts():
        if name == f"Palimpsa{CONFIG_MAPPING[host].__name__}":
            return config_class(host)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
