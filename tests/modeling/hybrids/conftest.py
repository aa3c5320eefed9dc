"""One host and one hybrid a variant, made once; whoever changes one takes a copy."""

import json
from functools import cache

import pytest
from palimpsa_surgery.modeling.bundle import bundle_remote_code, remote_code_keys
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import known_hosts
from tiny_hybrids import DELTAS, VARIANTS, make_host, make_hybrid, with_true_bounds

KINDS = [kind for kind in VARIANTS if kind in known_hosts()]
KNOWN = [variant for variant in VARIANTS if variant.partition("/")[0] in known_hosts()]


@cache
def _host(variant):
    return with_true_bounds(make_host(variant))


@cache
def _hybrid(variant):
    return make_hybrid(variant)


@pytest.fixture(scope="session", params=KNOWN)
def variant(request):
    """Every branch of every host's code."""
    return request.param


@pytest.fixture(scope="session", params=KINDS)
def kind(request):
    """Every host."""
    return request.param


@pytest.fixture(scope="session", params=[one for one in KNOWN if one not in DELTAS])
def mamba_variant(request):
    """Every branch of the code of the hosts whose mixers are Mamba2."""
    return request.param


@pytest.fixture(scope="session", params=[one for one in KINDS if one not in DELTAS])
def mamba_kind(request):
    """Every host whose mixers are Mamba2."""
    return request.param


@pytest.fixture
def host():
    """variant -> the host with the true bounds of the step size."""
    return _host


@pytest.fixture
def hybrid():
    """variant -> the same with layers swapped and importance that matters."""
    return _hybrid


@pytest.fixture
def save_with_code():
    """(model, folder) -> nothing; writes the model's folder with the code that runs it without the package."""

    def save(model, folder):
        model.save_pretrained(folder)
        bundle_remote_code(folder, model.config.model_type)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **remote_code_keys(model.config.model_type)}))

    return save
