"""The Ray actor of a rank: holds a Worker, and no logic. Its process death is the head's death notice."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .spec import Ended, Progress, WorkerSpec

if TYPE_CHECKING:  # at run time it is imported in the actor's process, under the environment that Ray gave it
    from .worker import Worker


class WorkerActor:
    """An async actor. Ray starts it with the environment that MLX needs; MLX is imported on the engine thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        self._spec = spec
        self._worker: Worker | None = None

    async def run(self) -> Ended:
        """Serve until `stop`, or say why that cannot be."""
        from .worker import Worker

        self._worker = Worker(self._spec)
        return await self._worker.run()

    async def progress(self) -> Progress:
        """How far the start is."""
        return self._worker.progress if self._worker is not None else Progress()

    async def stop(self) -> None:
        """End `run`."""
        if self._worker is not None:
            self._worker.stop()
