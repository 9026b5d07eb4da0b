"""Which model types the installed mlx-lm can build, found by reading its source.

Importing mlx-lm costs over a second and starts MLX, so the command line reads the files instead.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import re
import threading
from pathlib import Path
from typing import Any

from ..errors import ModelError

# CPython 3.11's parser counts its recursion for the whole process: two threads at once make it a SystemError.
_PARSING = threading.Lock()
_MODEL_CLASS = re.compile(r"^class Model\b", re.MULTILINE)


def check_architecture(config: dict[str, Any], name: str) -> None:
    """Raises ModelError, with the closest known types, when mlx-lm has no model of `config["model_type"]`."""
    if config.get("model_file") is not None:  # the model brings its own code; loading asks for trust_remote_code
        return
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{name}: config.json has no model_type, so it is not a language model that mlx-lm can load.")
    if module_name(config) not in supported_types():
        close = difflib.get_close_matches(model_type, sorted(supported_types() | set(_table("MODEL_REMAPPING"))), n=3)
        hint = f" Closest: {', '.join(close)}." if close else ""
        raise ModelError(f"{name}: mlx-lm has no model type {model_type!r}; choose a model of another type.{hint}")


def module_name(config: dict[str, Any]) -> str:
    """The mlx-lm module that builds this config, by the same two tables as `mlx_lm.utils._get_classes`."""
    model_type = str(config["model_type"])
    architectures = config.get("architectures") or ()
    for architecture in (architectures,) if isinstance(architectures, str) else architectures:
        special = _table("MODEL_ARCHITECTURE_REMAPPING").get((model_type, architecture))
        if special is not None:
            return str(special)
    return str(_table("MODEL_REMAPPING").get(model_type, model_type))


@functools.cache
def supported_types() -> frozenset[str]:
    """The model modules of mlx-lm; helpers beside them (`cache`, `base`) have no class Model and are left out."""
    files = (_mlx_lm() / "models").glob("*.py")
    return frozenset(path.stem for path in files if _MODEL_CLASS.search(path.read_text(encoding="utf-8")))


@functools.cache
def _table(name: str) -> dict[Any, Any]:
    """The dictionary literal assigned to `name` in `mlx_lm/utils.py`; empty when this version has none."""
    with _PARSING:
        tree = ast.parse((_mlx_lm() / "utils.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            value = ast.literal_eval(node.value)
            return value if isinstance(value, dict) else {}
    return {}


def _mlx_lm() -> Path:
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.origin is None:
        raise ModelError("mlx-lm is not installed in this environment; install pomona again with its dependencies.")
    return Path(spec.origin).parent
