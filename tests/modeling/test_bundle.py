"""Model folders that bring their code: loading in a process where this package cannot be imported."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from absent import ABSENT, run
from palimpsa_surgery.kernels.metaplastic.scan import METAPLASTIC_SCAN
from palimpsa_surgery.modeling import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.modeling.bundle import auto_map, bundle_remote_code, flat_name, flatten, remote_code_keys
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import check_imports, get_relative_import_files


@pytest.fixture
def folder(lively_model, tmp_path):
    """A model folder as a push would upload it, under a name that is no Python identifier."""
    target = tmp_path / "my-model.v1"
    lively_model().save_pretrained(target)
    bundle_remote_code(target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "auto_map": auto_map()}))
    return target


@pytest.mark.slow
def test_loads_with_the_flag_generates_and_saves_where_the_package_is_absent(folder, tmp_path, lively_model, ids):
    """With numba; what is pushed, hybrids and Palimpsa-D are loaded without it in their own tests."""
    code = """
        import torch
        from transformers import AutoModel, AutoModelForCausalLM
        source, out = sys.argv[1:]
        try:
            AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False)
        except ValueError as error:
            assert "trust_remote_code=True" in str(error), error
        else:
            raise AssertionError("code was run without the flag")
        ids = torch.load(out + "/ids.pt")
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
        assert AutoModel.from_pretrained(source, trust_remote_code=True)(ids).last_hidden_state.shape == (2, 37, 24)
        with torch.no_grad():
            torch.save(model(ids).logits, out + "/logits.pt")
            torch.save(model.generate(ids[:, :5], max_new_tokens=6, do_sample=False), out + "/tokens.pt")
        model.save_pretrained(out + "/again")
        again = AutoModelForCausalLM.from_pretrained(out + "/again", trust_remote_code=True)
        assert torch.equal(again(ids).logits, model(ids).logits)
    """
    torch.save(ids, tmp_path / "ids.pt")
    done = run(code, folder, tmp_path, home=tmp_path)
    assert done.returncode == 0, done.stderr
    # Compiled code is kept beside the copy that transformers makes, for the next process.
    assert any(tmp_path.rglob("__pycache__/*.nbi"))
    model = lively_model()
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(ids).logits)
        assert torch.equal(
            torch.load(tmp_path / "tokens.pt"), model.generate(ids[:, :5], max_new_tokens=6, do_sample=False)
        )


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": True}], ids=str)
def test_with_the_package_imported_its_own_class_loads(folder, lively_model, ids, options):
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert type(model) is PalimpsaMamba2ForCausalLM
    assert torch.equal(model(ids).logits, lively_model()(ids).logits)


def test_transformers_finds_every_file_and_asks_for_no_package_but_its_own(folder, monkeypatch):
    """Files from the Hub are checked one by one, each for packages that are not installed."""
    monkeypatch.setattr("importlib.import_module", refuse_absent(__import__("importlib").import_module))
    main = folder / "modeling_palimpsa_mamba2.py"
    reached = {Path(path).name for path in get_relative_import_files(main)}
    written = {path.name for path in folder.glob("*.py")}
    assert reached | {main.name} == written
    for name in written:
        check_imports(folder / name)


def refuse_absent(original):
    def import_module(name, package=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return original(name, package)

    return import_module


MODEL_TYPES = ("palimpsa_mamba2", "palimpsa_bamba")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_files_are_flat_and_never_name_the_package(tmp_path, model_type):
    names = bundle_remote_code(tmp_path, model_type)
    assert names == tuple(sorted(path.name for path in tmp_path.iterdir()))
    assert any("delta" in name for name in names) == (model_type != "palimpsa_mamba2"), "of hybrids alone"
    assert {f"kernels_{one.module.replace('.', '_')}.py" for one in METAPLASTIC_SCAN.backends.values()} <= set(names)
    assert {
        "base_errors.py",
        "kernels_metaplastic_scan.py",
        "kernels_metaplastic_torch_chunk.py",
        "mixers_geometry.py",
    } <= set(names)
    for name in names:
        tree = ast.parse((tmp_path / name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1, name
                modules = [node.module] if node.module else [alias.name for alias in node.names]
                assert {f"{module}.py" for module in modules} <= set(names), name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert not module.startswith("palimpsa"), name


def test_a_kind_of_model_has_its_own_files_alone(tmp_path):
    plain, hybrid = (set(bundle_remote_code(tmp_path / name, name)) for name in MODEL_TYPES)
    assert plain - hybrid == {
        "configuration_palimpsa_mamba2.py",
        "initial_values.py",
        "mixers_attention.py",
        "mixers_attention_geometry.py",
        "mixers_attention_states.py",
        "mixers_mamba2_keys.py",
        "modeling_palimpsa_mamba2.py",
        "outputs.py",
    }
    assert {name for name in hybrid - plain if "_delta_" not in name} == {
        "configuration_palimpsa_hybrid.py",
        "hosts.py",
        "mixer_delta.py",
        "mixer_hybrid.py",
        "modeling_palimpsa_hybrid.py",
        "swapping.py",
    }


def test_keys_of_a_hybrid_name_its_classes():
    assert remote_code_keys("palimpsa_nemotron_h") == {
        "architectures": ["PalimpsaNemotronHForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_palimpsa_hybrid.PalimpsaNemotronHConfig",
            "AutoModel": "modeling_palimpsa_hybrid.PalimpsaNemotronHModel",
            "AutoModelForCausalLM": "modeling_palimpsa_hybrid.PalimpsaNemotronHForCausalLM",
        },
    }


def test_writing_twice_gives_the_same_files(tmp_path):
    names = bundle_remote_code(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in names}
    assert bundle_remote_code(tmp_path) == names
    assert {name: (tmp_path / name).read_bytes() for name in names} == before


def test_auto_map_names_classes_that_are_there(tmp_path):
    bundle_remote_code(tmp_path)
    assert set(auto_map()) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    for reference in auto_map().values():
        module, name = reference.split(".")
        assert re.search(rf"^class {name}\(", (tmp_path / f"{module}.py").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("mixers.mixer", "from .geometry import A\n", "from .mixers_geometry import A\n"),
        ("mixers.mixer", "from ..base.errors import A, B\n", "from .base_errors import A, B\n"),
        ("modeling.palimpsa_mamba2.outputs", "from ...mixers.states import A\n", "from .mixers_states import A\n"),
        (
            "mixers.mixer",
            "from ..kernels.metaplastic.scan import (\n    a,\n    b,\n)\n",
            "from .kernels_metaplastic_scan import (\n    a,\n    b,\n)\n",
        ),
        ("kernels.backends", "from .conv.causal_conv import a\n", "from .kernels_conv_causal_conv import a\n"),
        ("kernels.conv.triton_conv", "from .a import a\n", "from .kernels_conv_a import a\n"),
        (
            "kernels.conv.triton_conv",
            "def f():\n    from . import a\n",
            "def f():\n    from . import kernels_conv_a as a\n",
        ),
        (
            "kernels.conv.triton_conv",
            "from ..common import a, b as c\n",
            "from . import kernels_common_a as a\nfrom . import kernels_common_b as c\n",
        ),
        ("kernels.backends", "import torch\nimport os\n", "import torch\nimport os\n"),
        ("kernels.backends", "import triton\n", "try:\n    import triton\nexcept ImportError:\n    raise\n"),
        (
            "kernels.backends",
            "def f():\n    import triton.language as tl\n",
            "def f():\n    try:\n        import triton.language as tl\n    except ImportError:\n        raise\n",
        ),
        (
            "kernels.backends",
            "try:\n    import mamba_ssm\nexcept ImportError:\n    pass\n",
            "try:\n    import mamba_ssm\nexcept ImportError:\n    pass\n",
        ),
    ],
)
def test_flatten(module, source, expected):
    assert flatten(source, module) == expected
    ast.parse(expected)


def test_flat_names():
    assert flat_name("mixers.geometry") == "mixers_geometry"
    assert flat_name("modeling.palimpsa_mamba2.outputs") == "outputs"
    assert flat_name("kernels.backends") == "kernels_backends"
    assert flat_name("kernels.conv.triton_conv") == "kernels_conv_triton_conv"
