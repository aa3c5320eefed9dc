"""The models: importing this package makes the Auto classes of transformers know them."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ..mixers.geometry import GateSpec, MixerGeometry
from ..mixers.importance import LayerImportance, record_importance
from ..mixers.metaplasticity import Metaplasticity, metaplasticity_off
from ..mixers.mixer import Mamba2Mixer, PalimpsaMixer
from .hybrids.configuration_palimpsa_hybrid import config_class, known_hosts
from .hybrids.modeling_palimpsa_hybrid import model_class
from .palimpsa_mamba2.configuration_palimpsa_mamba2 import PalimpsaMamba2Config
from .palimpsa_mamba2.modeling_palimpsa_mamba2 import (
    PalimpsaMamba2ForCausalLM,
    PalimpsaMamba2Model,
    PalimpsaMamba2PreTrainedModel,
)

AutoConfig.register(PalimpsaMamba2Config.model_type, PalimpsaMamba2Config, exist_ok=True)
AutoModel.register(PalimpsaMamba2Config, PalimpsaMamba2Model, exist_ok=True)
AutoModelForCausalLM.register(PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM, exist_ok=True)
for _host in known_hosts():
    AutoConfig.register(config_class(_host).model_type, config_class(_host), exist_ok=True)
    AutoModel.register(config_class(_host), model_class(_host, headless=True), exist_ok=True)
    AutoModelForCausalLM.register(config_class(_host), model_class(_host), exist_ok=True)

__all__ = [
    "GateSpec",
    "LayerImportance",
    "Mamba2Mixer",
    "Metaplasticity",
    "MixerGeometry",
    "PalimpsaMamba2Config",
    "PalimpsaMamba2ForCausalLM",
    "PalimpsaMamba2Model",
    "PalimpsaMamba2PreTrainedModel",
    "PalimpsaMixer",
    "metaplasticity_off",
    "record_importance",
]
