"""What a server says of itself: the models it lists, its version, its settings, its counters of speculation.

Kept as evidence beside the numbers, in the server's own words and cut short. Nothing here is believed: a missing answer is left out, and no number of a
record is computed from one, except the share of drafted tokens accepted, which says so.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from lab.engines.server.client import Client

_ROUTES = ("/version", "/props", "/get_server_info", "/v1/status")
"""vLLM, llama-server, SGLang, Strata."""
_LONGEST = 300
_DRAFTED = re.compile(r"^vllm:spec_decode_num_draft_tokens(?:_total)?(?:\{[^}]*\})? (\S+)$", re.M)
_ACCEPTED = re.compile(r"^vllm:spec_decode_num_accepted_tokens(?:_total)?(?:\{[^}]*\})? (\S+)$", re.M)


def listed_models(client: Client) -> list[str]:
    """The ids of `/models`, in its order; empty where it answers nothing of the kind."""
    data = _json(client.ask(client.address.api + "/models"))
    entries = data.get("data") if isinstance(data, dict) else None
    return [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry] if isinstance(entries, list) else []


def said_of_itself(client: Client) -> dict[str, Any]:
    """{route: its plain values}, for the routes that answer with a JSON object. Lists, templates and other long values are left out."""
    answers = {route: _json(client.ask(client.address.root + route)) for route in _ROUTES}
    return {route: _plain(data) for route, data in answers.items() if isinstance(data, dict)}


@dataclass(frozen=True)
class Drafts:
    """Tokens drafted and accepted since the server's start, by its own counters (Prometheus, vLLM's names); None where it has none."""

    drafted: float | None = None
    accepted: float | None = None

    @classmethod
    def read(cls, client: Client) -> Self:
        """The counters now, summed over engines."""
        text = client.ask(client.address.root + "/metrics") or ""
        return cls(_sum(_DRAFTED, text), _sum(_ACCEPTED, text))

    def since(self, before: Drafts) -> dict[str, Any]:
        """Details of a measurement between two readings; empty where nothing was drafted."""
        if self.drafted is None or self.accepted is None or before.drafted is None or before.accepted is None:
            return {}
        drafted, accepted = self.drafted - before.drafted, self.accepted - before.accepted
        return {"server_drafted_tokens": drafted, "server_accepted_tokens": accepted, "acceptance": accepted / drafted} if drafted > 0 else {}


def _sum(pattern: re.Pattern[str], text: str) -> float | None:
    found = [float(value) for value in pattern.findall(text)]
    return sum(found) if found else None


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= _LONGEST)}


def _json(text: str | None) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None
