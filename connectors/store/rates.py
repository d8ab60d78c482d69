"""How fast the engine computes prompts, told from its steps, and whether a load from slow tiers is still worth the wait.

Promise: only steps of MIN_TOKENS and more count, and only if one of their requests runs in the step that follows, so that the time between
the two is the engine's and not the users'. Unknown until then: every load is waited for, up to its deadline.
"""

from __future__ import annotations

from ...common.node.client import Fetch

MIN_TOKENS = 256
# Weight of what was measured before, at each new step: about the last ten count.
MEMORY = 0.9


class PrefillRate:
    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._computed: dict[str, int] = {}
        self._step: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._ended = 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 where nothing is known yet."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def begin(self, request_id: str, tokens: int) -> None:
        """So many tokens of the request are there without being computed. May come again when they are loaded."""
        self._computed[request_id] = max(self._computed.get(request_id, 0), tokens)

    def scheduled(self, request_id: str, final_tokens: int) -> None:
        """After the step that is being planned so many of the request's tokens are computed."""
        self._step[request_id] = max(final_tokens - self._computed.get(request_id, final_tokens), 0)
        self._computed[request_id] = final_tokens

    def finish(self, request_id: str) -> None:
        self._computed.pop(request_id, None)

    def end_step(self, now: float) -> None:
        tokens = sum(self._last.values())
        if tokens >= MIN_TOKENS and not self._last.keys().isdisjoint(self._step):
            self._tokens = MEMORY * self._tokens + tokens
            self._seconds = MEMORY * self._seconds + now - self._ended
        self._last, self._step = self._step, {}
        self._ended = now

    def worth_waiting(self, fetch: Fetch, tokens: int, now: float) -> bool:
        """Has this fetch, of so many tokens, waited for slow tiers less than it takes to compute them?"""
        rate = self.tokens_per_s
        return not fetch.slow or not rate or now - fetch.started < tokens / rate
