"""Where the endpoint is: the parts of `path.server.url`, read once and checked.

`/health`, `/version` and `/metrics` hang on the server's root, the OpenAI routes on the url itself. That something listens there is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from lab.errors import LabError


@dataclass(frozen=True)
class Address:
    """`api` is the url without a trailing slash (.../v1), `root` the server in front of it."""

    api: str
    root: str
    host: str
    port: int


def address(url: str) -> Address:
    """The address of `path.server.url`. Raises LabError where it is no http address of an API."""
    wrong = LabError(f"path.server.url={url}: must be an http address such as http://127.0.0.1:8000/v1")
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        raise wrong from None
    if not parts.hostname or parts.query or parts.fragment:
        raise wrong
    return Address(api=url.rstrip("/"), root=f"{parts.scheme}://{parts.netloc}", host=parts.hostname, port=port)
