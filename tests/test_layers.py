"""The rules that keep the source readable, checked on its syntax trees."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "palimpsa_surgery"
LAYERS = ("base", "kernels", "mixers", "modeling", "surgery", "recipes", "sharing", "doctor", "cli")

# Each room imports from itself and from those before it: a folder, or a file that stands among folders.
ROOMS = (
    *("base", "kernels/backends", "kernels/common", "kernels/conv", "kernels/metaplastic", "kernels/ssd"),
    "kernels/metaplastic_delta",
    *("mixers", "modeling/strict_loading", "modeling/palimpsa_mamba2", "modeling/palimpsa_d", "modeling/hybrids"),
    *("modeling/__init__", "modeling/bundle"),
    *("surgery/__init__", "surgery/families", "surgery/checkpoint", "surgery/measure"),
    *("surgery/planning", "surgery/conversion"),
    *("recipes/__init__", "recipes/launch", "recipes/data", "recipes/training"),
    *("recipes/evaluation/suites", "recipes/evaluation", "recipes/demo_plots", "recipes/demo"),
    *("sharing", "doctor", "cli", "__main__"),
)
MOST_FILES = 16

# A file that may be longer than the rest, and why.
LONG_FILES = {"cli.py": "every option of every verb with its help, and no logic; the only file that prints"}


def sources() -> list[Path]:
    files = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
    return [ROOT / "__init__.py", ROOT / "__main__.py", ROOT / "doctor.py", ROOT / "cli.py", *files]


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def each_source(function):
    return pytest.mark.parametrize("path", sources(), ids=relative)(function)


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """(line, absolute module) of every import in the file, those inside functions too."""
    package = [PACKAGE, *path.relative_to(ROOT).parts[:-1]]
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            found.append((node.lineno, module))
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize(
    ("folder", "line", "expected"),
    [
        ("kernels", "from ..base.errors import X", "palimpsa_surgery.base.errors"),
        ("kernels", "def f():\n    from .. import recipes", "palimpsa_surgery.recipes"),
        ("surgery/planning", "from . import plan", "palimpsa_surgery.surgery.planning.plan"),
        ("surgery/planning", "from ..measure import profile", "palimpsa_surgery.surgery.measure.profile"),
        ("base", "import torch.nn", "torch.nn"),
    ],
)
def test_the_finder_of_imports_sees_every_form(tmp_path, monkeypatch, folder, line, expected):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "module.py").write_text(line)
    assert expected in [module for _, module in imported_modules(tmp_path / folder / "module.py")]


def module_file(module: str) -> Path | None:
    """The file of a dotted name in the package, which may end with a name inside the file; None for other packages."""
    parts = module.split(".")
    if parts[0] != PACKAGE:
        return None
    for end in range(len(parts), 1, -1):
        place = ROOT.joinpath(*parts[1:end])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
        if place.is_dir():
            return None  # a folder that is only a name
    return None


def imported_files(path: Path) -> dict[Path, int]:
    """The package's files that a file imports, with the line."""
    found = {module_file(module): line for line, module in imported_modules(path)}
    return {file: line for file, line in found.items() if file not in (None, path)}


def room(path: Path) -> str:
    """The room of a file: its folder, or itself where it stands among folders."""
    folder = relative(path.parent)
    return folder if folder in ROOMS else relative(path.with_suffix(""))


@each_source
def test_each_room_imports_only_from_those_before(path):
    if path == ROOT / "__init__.py":
        return  # names modules as strings, imports them when asked
    order = {name: place for place, name in enumerate(ROOMS)}
    for file, line in imported_files(path).items():
        if file != ROOT / "__init__.py":
            assert order[room(file)] <= order[room(path)], f"{relative(path)}:{line} imports {relative(file)}"


def test_no_modules_import_each_other_in_a_circle():
    graph = {path: set(imported_files(path)) for path in sources() if path != ROOT / "__init__.py"}
    while free := {path for path, needs in graph.items() if not needs & set(graph)}:
        graph = {path: needs for path, needs in graph.items() if path not in free}
    assert not [relative(path) for path in graph]


@pytest.mark.parametrize("room", sorted({relative(path.parent) for path in sources()}))
def test_a_folder_can_be_overlooked(room):
    assert len(list((ROOT / room).glob("*.py"))) <= MOST_FILES


@each_source
def test_imports_inside_the_package_are_relative(path):
    for node in ast.walk(tree_of(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        assert not [n for n in names if n.split(".")[0] == PACKAGE], f"{relative(path)}:{node.lineno}"


@pytest.mark.parametrize(
    ("folder", "package"), [("base", "torch"), ("kernels", "transformers"), ("mixers", "transformers")]
)
def test_what_a_layer_never_imports(folder, package):
    for path in (ROOT / folder).rglob("*.py"):
        assert not [m for _, m in imported_modules(path) if m.split(".")[0] == package], relative(path)


def test_a_checkpoint_is_opened_and_planned_without_waiting_for_transformers():
    code = """
import sys
from palimpsa_surgery import make_plan, open_checkpoint
from palimpsa_surgery.base.text import embedded_checkpoint_path
checkpoint = open_checkpoint(embedded_checkpoint_path())
assert checkpoint.sites[make_plan(checkpoint, layers=(1,)).layers[0]].module == "backbone.layers.1.mixer"
assert "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_folder_named_like_another_package_is_no_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_heavy_imports_of_the_command_line_wait_until_they_are_needed():
    tree = ast.parse((ROOT / "cli.py").read_text(encoding="utf-8"))
    top = {
        name.split(".")[0]
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert not top & {"torch", "transformers", "numpy", "pydantic", "matplotlib", "accelerate", "datasets", "peft"}


# What the modules that a verb imports load with them, of all that takes a second or more: what is not here is imported
# once it is needed, so that a mistake in an option is told at once.
HEAVY = {"transformers", "matplotlib", "numba", "triton", "accelerate", "datasets", "peft", "lm_eval"}
LOADED = {
    **{verb: set() for verb in ("inspect", "measure", "plan", "convert", "merge", "export", "push")},
    **{verb: {"transformers"} for verb in ("finetune", "evaluate", "generate", "doctor")},
    "demo": {"transformers", "matplotlib"},
}


def loaded_at_once(nodes, package: list[str]):
    """Absolute modules that statements import when they run: not those inside functions, nor those for types alone."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)):
            yield from loaded_at_once(node.body, package)


def heavy_modules(nodes) -> set[str]:
    """The packages of `HEAVY` that importing loads, through all of this package's files."""
    todo, seen, found = list(loaded_at_once(nodes, [PACKAGE])), set(), set()
    while todo:
        module = todo.pop()
        found |= {module.split(".")[0]} & HEAVY
        parts = module.split(".")[1:] if module.split(".")[0] == PACKAGE else []
        inits = [ROOT.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts) + 1)]
        for file in {*inits, module_file(module)} - seen - {None}:
            seen.add(file)
            if file.is_file():
                package = [PACKAGE, *file.relative_to(ROOT).parts[:-1]]
                todo += loaded_at_once(tree_of(file).body, package)
    return found


def test_a_verb_loads_only_what_it_needs_at_once():
    functions = [
        node for node in ast.parse((ROOT / "cli.py").read_text("utf-8")).body if hasattr(node, "decorator_list")
    ]
    verbs = {one.name: one for one in functions if any(getattr(d, "id", "") == "verb" for d in one.decorator_list)}
    assert {name: heavy_modules(verb.body) for name, verb in verbs.items()} == LOADED


@each_source
def test_weights_are_never_loaded_leniently(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id == "zip"):
            lenient = [k for k in node.keywords if k.arg == "strict" and getattr(k.value, "value", None) is False]
            assert not lenient, f"{relative(path)}:{node.lineno}: strict=False"


@each_source
def test_paths_in_a_model_are_known_to_its_class_its_family_and_who_reads_files(path):
    known = ("modeling/palimpsa_mamba2/", "modeling/palimpsa_d/", "surgery/families/", "surgery/checkpoint/")
    if relative(path).startswith(known):
        return
    found = re.findall(r"backbone\.layers|\.backbone\b|\.lm_head\b", text_of(path))
    assert not found, f"{relative(path)}: {found[0]}; take a site, get_decoder() or get_output_embeddings()"


@each_source
def test_only_the_command_line_prints(path):
    if path.name == "cli.py":
        return
    for node in ast.walk(tree_of(path)):
        is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        assert not is_print, f"{relative(path)}:{node.lineno}: print"


@each_source
def test_files_stay_short(path):
    limit = 600 if relative(path).startswith("kernels/") else 400
    lines = len(text_of(path).splitlines())
    assert lines <= limit or relative(path) in LONG_FILES, f"{relative(path)} has {lines} lines"


def test_a_long_file_that_became_short_leaves_the_list():
    for name, reason in LONG_FILES.items():
        assert reason
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) > 400, name
