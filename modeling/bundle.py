"""Writes the model's code as flat files, so that a model folder loads in a process without this package.

transformers runs remote code from one folder, where a file may only say `from .x import y`; it copies the files that
it finds so named, and refuses to start when a file names an absolute package that is not installed, unless the import
stands in a `try`. So modules get flat names (`kernels/conv/triton_conv.py` becomes `kernels_conv_triton_conv.py`),
relative imports follow, imports of optional packages are put into a `try`, and the main file names every other one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ..base.files import write_text

_ROOT = Path(__file__).resolve().parent.parent
_MAMBA2, _D, _HYBRID = "palimpsa_mamba2", "palimpsa_d", "palimpsa_hybrid"
_HOMES = {_MAMBA2: ("palimpsa_mamba2",), _D: ("palimpsa_mamba2", "palimpsa_d"), _HYBRID: ("hybrids",)}
_AUTO = {"AutoConfig": "configuration", "AutoModel": "modeling", "AutoModelForCausalLM": "modeling"}
_REQUIRED = {"torch", "transformers"}
_HEADER = "# Part of palimpsa-surgery (Apache-2.0), written beside the model so that it loads without the package.\n"


def auto_map(model_type: str = _MAMBA2) -> dict[str, str]:
    """What `auto_map` in config.json must say for the Auto classes to find the flat files of a kind of model."""
    kind, classes = _kind(model_type), _classes(model_type)
    return {auto: f"{part}_{kind}.{name}" for (auto, part), name in zip(_AUTO.items(), classes, strict=True)}


def remote_code_keys(model_type: str = _MAMBA2) -> dict[str, Any]:
    """The keys of config.json that belong to the code in the folder."""
    return {"architectures": [_classes(model_type)[-1]], "auto_map": auto_map(model_type)}


def bundle_remote_code(folder: str | Path, model_type: str = _MAMBA2) -> tuple[str, ...]:
    """Writes the flat files into `folder`, over those of an earlier bundle.

    Args:
        folder: a model folder; `config.json` there is not touched, see `auto_map`.
        model_type: of the model, ours: it says which files are needed.

    Returns:
        The names of the files, sorted.
    """
    files = _flat_files(_kind(model_type))
    for name, text in files.items():
        write_text(Path(folder) / name, text)
    return tuple(sorted(files))


@cache
def _flat_files(kind: str) -> dict[str, str]:
    """The files of a kind of model by name; a process that writes many models reads the sources once."""
    sources = {flat_name(module): (module, path) for module, path in _sources(_HOMES[kind])}
    texts = {name: flatten(path.read_text(encoding="utf-8"), module) for name, (module, path) in sources.items()}
    main = f"modeling_{kind}"
    texts = _needed(texts, [main, f"configuration_{kind}"])
    texts[main] += _reach(sorted(texts.keys() - {main}))
    return {f"{name}.py": _HEADER + text for name, text in texts.items()}


def _needed(texts: dict[str, str], start: list[str]) -> dict[str, str]:
    """Of flat files by name, those that `start` imports, also through others and as a backend of an operator."""
    found, todo = set(), list(start)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _named(texts[name]) & texts.keys()
    return {name: text for name, text in texts.items() if name in found}


def _named(text: str) -> set[str]:
    """Flat names that a flat file may mean: after `from .`, and of the modules that backends are given as strings."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            names |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Backend", "kernel_module"):
            names |= {f"kernels_{one.value.replace('.', '_')}" for one in node.args if isinstance(one, ast.Constant)}
    return names


def flat_name(module: str) -> str:
    """The flat name of a module ("kernels.conv.triton_conv"): all of its path, but of `modeling` the last name."""
    parts = module.split(".")
    return parts[-1] if parts[0] == "modeling" else "_".join(parts)


def flatten(source: str, module: str) -> str:
    """The source of `module` ("mixers.mixer"), with its imports fit for a flat folder."""
    lines = source.splitlines(keepends=True)
    nodes = list(_imports(ast.parse(source), guarded=False))
    for node, guarded in sorted(nodes, key=lambda pair: pair[0].lineno, reverse=True):
        first, last = node.lineno - 1, node.end_lineno
        text = "".join(lines[first:last])
        lines[first:last] = [_rewritten(text, node, module, guarded)]
    return "".join(lines)


def _kind(model_type: str) -> str:
    """What the files of the config and of the model are called after."""
    return model_type if model_type in (_MAMBA2, _D) else _HYBRID


def _classes(model_type: str) -> tuple[str, str, str]:
    """Names of the classes of config, model without head, and causal model."""
    if model_type == _MAMBA2:
        return "PalimpsaMamba2Config", "PalimpsaMamba2Model", "PalimpsaMamba2ForCausalLM"
    if model_type == _D:
        return "PalimpsaDConfig", "PalimpsaDModel", "PalimpsaDForCausalLM"
    from .hybrids.configuration_palimpsa_hybrid import config_class
    from .hybrids.hosts import PREFIX
    from .hybrids.modeling_palimpsa_hybrid import model_class

    host = model_type.removeprefix(PREFIX)
    classes = config_class(host), model_class(host, headless=True), model_class(host)
    return tuple(made.__name__ for made in classes)


def _sources(homes: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Every module of the bundle of a kind of model, by its dotted name in the package."""
    yield "base.errors", _ROOT / "base" / "errors.py"
    shared = [path for part in ("kernels", "mixers") for path in sorted((_ROOT / part).rglob("*.py"))]
    own = [
        path
        for part in ("modeling", *(f"modeling/{home}" for home in homes))
        for path in sorted((_ROOT / part).glob("*.py"))
    ]
    for path in (*shared, *own):
        if path.name not in ("__init__.py", "bundle.py"):
            yield ".".join(path.relative_to(_ROOT).with_suffix("").parts), path


def _imports(node: ast.AST, guarded: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement, with whether it stands in a `try`."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, guarded
    if isinstance(node, ast.expr):
        return  # holds no statement, and most nodes are these
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, guarded or isinstance(node, ast.Try))


def _rewritten(text: str, node: ast.Import | ast.ImportFrom, module: str, guarded: bool) -> str:
    indent = text[: len(text) - len(text.lstrip())]
    if isinstance(node, ast.ImportFrom) and node.level:
        return _relative(text, indent, node, module)
    names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    packages = {name.split(".")[0] for name in names}
    if guarded or packages <= _REQUIRED | sys.stdlib_module_names:
        return text
    inner = "".join(f"    {line}" for line in text.splitlines(keepends=True))
    return f"{indent}try:\n{inner}{indent}except ImportError:\n{indent}    raise\n"


def _relative(text: str, indent: str, node: ast.ImportFrom, module: str) -> str:
    home = module.split(".")[: -node.level]
    target = ".".join([*home, *(node.module.split(".") if node.module else [])])
    if (_ROOT / target.replace(".", "/")).is_dir():  # from . import module
        names = [(flat_name(f"{target}.{alias.name}"), alias.asname or alias.name) for alias in node.names]
        return "".join(f"{indent}from . import {name} as {local}\n" for name, local in names)
    return re.sub(r"from\s+\.+[\w.]*\s+import", f"from .{flat_name(target)} import", text, count=1)


def _reach(names: list[str]) -> str:
    """Names the other files where transformers looks for what to copy; never run, they are imported when needed."""
    imports = "".join(f"    from .{name} import *\n" for name in names)
    return f"\n\nif False:  # what must be copied along with this file\n{imports}"
