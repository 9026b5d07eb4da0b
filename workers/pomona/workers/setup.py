"""What the engine thread does first: fetch or convert, read weights, measure memory. Everything that touches MLX."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import environment
from .engine.base import EngineRequest, MemoryUse, Text
from .engine.engine import EngineParts
from .errors import OperatorError
from .models.profile import MemoryProfile
from .spec import Progress, Stage, WorkerSpec

log = logging.getLogger(__name__)

Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the rest of the worker needs to know of the model."""

    parts: EngineParts
    memory: MemoryProfile
    tokenizer: Any
    vocab_size: int


def prepare(spec: WorkerSpec, report: Report) -> Loaded:
    """Load the model that the spec names and profile it. Runs on the engine thread. Raises OperatorError."""
    import mlx.core as mx

    from .engine.rows import unbatchable
    from .models import caches, loading, profile
    from .models.last_token import only_last_token

    path = local_folder(spec, report)
    report(Progress(Stage.READING))
    model = loading.load(
        path,
        trust_remote_code=spec.trust_remote_code,
        dtype=spec.dtype,
        progress=lambda done, total: report(Progress(Stage.READING, done, total)),
    )
    context = context_tokens(spec, model.context_tokens)
    make_caches = caches.maker(model.model, spec.kv_bits)
    if kinds := unbatchable(make_caches()):
        log.warning(
            "%s: its requests are computed one by one, since %s cannot be batched", spec.model, ", ".join(kinds)
        )
    only_last_token(model.model)
    report(Progress(Stage.MEASURING))
    budget = profile.budget(spec.mem_fraction_static, spec.ranks_on_host)
    reserve = profile.measure_reserve(model.model, min(spec.chunked_prefill_size, context))
    memory = profile.kv_pool(
        budget,
        model.weights_bytes,
        reserve,
        profile.state_shape(model.model, make_caches),
        ranks_on_host=spec.ranks_on_host,
        aux_slots=spec.aux_slots,
        mamba_full_memory_ratio=spec.mamba_full_memory_ratio,
        max_total_tokens=spec.max_total_tokens,
        context_tokens=context,
    )
    # Over the limit MLX frees its cache before it allocates; what Metal cannot give would abort the process.
    mx.set_memory_limit(budget)
    # Buffers that were freed are kept for the next step's activations, and no more of them than those need.
    mx.set_cache_limit(reserve)
    vocab_size = _vocab_size(model.model, model.config, model.tokenizer)
    parts = EngineParts(
        make_runner=lambda: _runner(model, make_caches, vocab_size, memory.kv_tokens),
        new_text=_texts(model.tokenizer),
        memory=lambda: MemoryUse(mx.get_active_memory(), mx.get_cache_memory(), budget),
        context_tokens=context,
    )
    return Loaded(parts, memory, model.tokenizer, vocab_size)


def local_folder(spec: WorkerSpec, report: Report) -> Path:
    """The mlx-lm folder of the spec's model on this host: found, downloaded, or converted from GGUF."""
    from .models import gguf, source

    found = source.resolve(spec.source)
    if found.path is None:
        report(Progress(Stage.FETCHING))
    path = source.fetch(found, lambda done, total: report(Progress(Stage.FETCHING, done, total)))
    if path.is_dir():
        return path
    report(Progress(Stage.CONVERTING))
    scale = path.stat().st_size
    return gguf.cached_conversion(
        path,
        environment.cache_dir(),
        gguf.resolve_dtype(spec.dtype),
        lambda done: report(Progress(Stage.CONVERTING, int(done * scale), scale)),
    )


def context_tokens(spec: WorkerSpec, model_context: int) -> int:
    """The context window in force. Raises OperatorError when more is asked for than the model has."""
    if spec.context_length is None:
        return model_context
    if spec.context_length > model_context:
        raise OperatorError(
            f"--context-length {spec.context_length} is more than {spec.model}'s {model_context}: "
            f"use at most {model_context}"
        )
    return spec.context_length


def _vocab_size(model: Any, config: dict[str, Any], tokenizer: Any) -> int:
    text = config.get("text_config") or config
    return int(text.get("vocab_size") or len(tokenizer))


def _runner(model: Any, make_caches: Callable[[], list[Any]], vocab_size: int, kv_tokens: int) -> Any:
    from .engine.calibration import step_cost
    from .engine.runner import ModelRunner

    cost = step_cost(model.model, make_caches)
    return ModelRunner(
        model.model,
        make_caches,
        eos=model.tokenizer.eos_token_ids,
        vocab_size=vocab_size,
        kv_tokens=kv_tokens,
        cost=cost,
    )


def _texts(tokenizer: Any) -> Callable[[EngineRequest], Text]:
    from .text.maker import TextMaker

    maker = TextMaker(tokenizer)
    return lambda request: maker.new(request, request.resumed_tokens)
