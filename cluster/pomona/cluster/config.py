"""What the operator asks for: one frozen tree, from flags or from a YAML file with the same names."""

from __future__ import annotations

import secrets
from collections.abc import Container
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pomona.workers.errors import OperatorError

from .capacity import AUX_SLOTS_WITH_PREFIX_CACHE, AUX_SLOTS_WITHOUT_PREFIX_CACHE, Limits
from .topology import Topology, resolve

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServeConfig(BaseModel):
    """Flags of `pomona serve`; the names are SGLang's where it has them. Sizes are of one replica."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    model: str
    served_model_name: str | None = None
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    enable_dp_attention: bool = False
    max_running_requests: int | None = Field(default=None, ge=1)
    max_mamba_cache_size: int | None = Field(default=None, ge=1)
    max_total_tokens: int | None = Field(default=None, ge=2)
    max_queued_requests: int = Field(default=1024, ge=1)
    context_length: int | None = Field(default=None, ge=2)
    mem_fraction_static: float = Field(default=0.8, gt=0, le=1)
    mamba_full_memory_ratio: float = Field(default=0.9, gt=0)
    disable_radix_cache: bool = False
    chunked_prefill_size: int = Field(default=512, ge=16)
    max_step_s: float = Field(default=0.25, gt=0)
    kv_bits: Literal[4, 8] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(default=9400, ge=1, le=65535)
    api_key: str | None = None
    address: str | None = None
    load_timeout_s: float = Field(default=1800.0, gt=0)

    @property
    def limits(self) -> Limits:
        """The replica's limits; whether the model is hybrid is learnt from the model."""
        slots = AUX_SLOTS_WITHOUT_PREFIX_CACHE if self.disable_radix_cache else AUX_SLOTS_WITH_PREFIX_CACHE
        return Limits(self.max_running_requests, self.max_mamba_cache_size, slots)

    def topology(self) -> Topology:
        """Raises OperatorError for sizes that do not go together."""
        return resolve(
            tp_size=self.tp_size,
            dp_size=self.dp_size,
            pp_size=self.pp_size,
            enable_dp_attention=self.enable_dp_attention,
        )

    def check_exposure(self) -> None:
        """Loopback by default; any other bind address needs an API key."""
        if self.host not in LOOPBACK and not self.api_key:
            raise OperatorError(f"--host {self.host} opens the endpoint to the network: give --api-key as well")


def is_file(model: str) -> bool:
    """Whether MODEL names a configuration file instead of a model."""
    return model.endswith((".yaml", ".yml"))


def load(model: str, flags: dict[str, Any]) -> ServeConfig:
    """The configuration of MODEL|CONFIG.yaml; flags that were given win over the file. Raises OperatorError."""
    values: dict[str, Any] = {"model": model}
    if is_file(model):
        values = _read(Path(model))
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return ServeConfig.model_validate(values | given)
    except ValidationError as exc:
        raise OperatorError(_explain(exc, model, given)) from exc


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError as exc:
        raise OperatorError(f"{path} is not there: name a configuration file or a model") from exc
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise OperatorError(f"{path} cannot be read as YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(values, dict) or "model" not in values:
        raise OperatorError(f"{path} is no configuration: it needs at least a line `model: …`")
    return values


def _explain(exc: ValidationError, model: str, flags: Container[str]) -> str:
    """The first thing that is wrong, in the words it was said in: a flag, or a key of the file."""
    error = exc.errors()[0]
    name = ".".join(str(part) for part in error["loc"])
    shown = "--" + name.replace("_", "-") if name in flags or not is_file(model) else name
    if error["type"] == "extra_forbidden":
        known = ", ".join(sorted(ServeConfig.model_fields))
        return f"{model}: unknown key {name}; the known ones are {known}"
    return f"{shown} {error['input']!r} is wrong: {error['msg'][0].lower()}{error['msg'][1:]}"


def new_token() -> str:
    """The cluster's secret: every gRPC call carries it."""
    return secrets.token_urlsafe(32)
