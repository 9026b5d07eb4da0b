"""Asking a running gateway."""

from __future__ import annotations

from typing import Any

import httpx

from pomona.workers.errors import OperatorError

TIMEOUT_S = 5.0


def fetch_cluster(url: str, api_key: str | None) -> dict[str, Any]:
    """The object of GET /cluster. Raises OperatorError when nothing answers or the key is refused."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url.rstrip('/')}/cluster", headers=headers, timeout=TIMEOUT_S)
    except httpx.HTTPError as exc:
        raise OperatorError(
            f"no pomona answers at {url} ({type(exc).__name__}): start one with `pomona serve MODEL`, or give --url"
        ) from exc
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise OperatorError(f"the gateway at {url} wants an API key: give --api-key or POMONA_API_KEY")
    if response.status_code != httpx.codes.OK:
        raise OperatorError(f"the gateway at {url} answered {response.status_code}: {response.text[:200]}")
    answer: dict[str, Any] = response.json()
    return answer
