"""Every environment variable and platform fact that pomona reads, in one place."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# Debian and its kin, then Fedora's. The pthread build: MLX calls BLAS from a thread of its own.
_OPENBLAS = (
    "/usr/lib/{arch}-linux-gnu/openblas-pthread/libblas.so.3",
    "/usr/lib/{arch}-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
)


def cache_dir(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """Where converted models are kept: POMONA_CACHE, or the platform's cache folder."""
    if "POMONA_CACHE" in environ:
        return Path(environ["POMONA_CACHE"])
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pomona"
    return Path(environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "pomona"


def openblas(platform: str = sys.platform, machine: str | None = None) -> str | None:
    """The OpenBLAS to preload on Linux, where there is one: prefill is 20 times faster than on the wheel's own BLAS."""
    if platform != "linux":
        return None
    arch = machine or os.uname().machine
    paths = (Path(p.format(arch=arch)) for p in _OPENBLAS)
    return next((str(p) for p in paths if p.exists()), None)


def worker_environment(*, openblas_path: str | None, cpus: int, ranks_on_host: int) -> dict[str, str]:
    """What a worker process needs before it imports mlx. Ranks of one host share its cores."""
    threads = str(max(1, cpus // max(1, ranks_on_host)))
    env = {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if openblas_path is not None:
        env["LD_PRELOAD"] = openblas_path
        # Its idle threads spin for 2**20 clock ticks, longer than between two products of a pass, and not for the 2**26
        # that it would: a core that other processes have work for.
        env["OPENBLAS_THREAD_TIMEOUT"] = "20"
    return env
