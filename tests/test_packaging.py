"""What is installed is what the repository holds, and it lives beside the PyPI package `kernels`."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("base", "kernels", "mixers", "modeling", "surgery", "recipes", "sharing")


def run(code: str, cwd: Path, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def pyproject() -> dict:
    tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no build folder appears in the working tree."""
    source, target = tmp_path_factory.mktemp("wheel") / "source", tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "tests", "benchmarks")
    shutil.copytree(ROOT, source, ignore=ignore)
    name = run(f"import setuptools.build_meta as b; print(b.build_wheel({str(target)!r}))", source).splitlines()[-1]
    return target / name


def test_every_extra_that_a_message_names_is_there_and_explained(pyproject):
    extras = pyproject["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    sources = [path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")]
    named = {
        extra: path.name
        for path in sources
        for extra in re.findall(r"palimpsa-surgery\[(\w+)\]", path.read_text(encoding="utf-8"))
    }
    assert {"train", "liger", "qlora"} <= set(named)
    for extra, file in named.items():
        assert extra in extras, f"{file} asks for an extra that is not there"
        assert f"| `{extra}` |" in page


def test_transformers_still_finds_the_other_package_named_kernels():
    if importlib.util.find_spec("transformers") is None or not _is_installed("kernels"):
        pytest.skip("needs the PyPI package kernels")
    code = "import kernels, transformers, sys; from transformers import Mamba2ForCausalLM; print(kernels.__file__)"
    assert not Path(run(code, ROOT).splitlines()[-1]).is_relative_to(ROOT / "kernels")


def _is_installed(name: str) -> bool:
    import importlib.metadata

    return any(d.metadata["Name"] == name for d in importlib.metadata.distributions())


def test_the_package_imports_from_the_repository_root():
    code = "import palimpsa_surgery.kernels.metaplastic.scan as a; print(a.__name__)"
    assert run(code, ROOT).strip() == "palimpsa_surgery.kernels.metaplastic.scan"


def test_importing_the_package_loads_nothing_heavy(tmp_path):
    code = "import palimpsa_surgery, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert run(code, tmp_path).strip() == "[]"


def test_the_wheel_holds_every_module_and_asset_and_nothing_else(wheel):
    modules = {p.relative_to(ROOT) for layer in LAYERS for p in (ROOT / layer).rglob("*.py")}
    modules |= {Path("__init__.py"), Path("__main__.py"), Path("cli.py"), Path("doctor.py"), Path("py.typed")}
    data = {p.relative_to(ROOT) for p in (ROOT / "assets").rglob("*") if p.is_file()}
    data |= {p.relative_to(ROOT) for p in (ROOT / "recipes").rglob("*.yaml")}
    expected = {f"palimpsa_surgery/{path.as_posix()}" for path in modules | data}
    assert "palimpsa_surgery/assets/sqlite-docs.jsonl.gz" in expected
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_where_the_repository_is_not(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import palimpsa_surgery as p; from palimpsa_surgery.base import text;"
        "import palimpsa_surgery.kernels.metaplastic.scan;"
        "print(p.__file__); print(len(list(text.iter_documents())))"
    )
    where, documents = run(code, tmp_path, PYTHONPATH=str(tmp_path / "site")).split()
    assert Path(where).is_relative_to(tmp_path)
    assert documents == "64"


def test_the_version_is_written_in_one_place(pyproject):
    assert "version" not in pyproject["project"]
    assert re.search(r'^__version__ = "\d+\.\d+\.\d+"$', (ROOT / "__init__.py").read_text(), re.MULTILINE)


def test_every_dependency_has_its_reason(pyproject):
    project = pyproject["project"]
    listed = project["dependencies"] + [d for extra in project["optional-dependencies"].values() for d in extra]
    names = {re.match(r"[A-Za-z0-9_.-]+", d).group() for d in listed} - {project["name"]}
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert not {name for name in names if f"`{name}`" not in page}


def test_there_is_enough_test_code():
    def lines(paths) -> int:
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)

    source = lines([*ROOT.glob("*.py"), *(p for d in LAYERS for p in (ROOT / d).rglob("*.py"))])
    tests = lines((ROOT / "tests").rglob("*.py"))
    assert tests >= 0.7 * source, f"{tests} lines of tests for {source} lines of source"


def test_ci_runs_what_the_readme_tells_a_contributor():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"```bash\n(.*?)```", readme, re.DOTALL) if "[dev]" in b)
    ran = {line.replace(" --quiet", "").strip() for line in ci.splitlines()}
    missing = [line for line in block.splitlines() if line.strip() and line.strip() not in ran]
    assert not missing, missing
