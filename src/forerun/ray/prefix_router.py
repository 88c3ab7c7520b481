"""Ray Serve's request router: the replica that probably has the prefix, unless it is much busier.

It runs where the handle is, in the ingress. Rules and index are those of replicas in one server.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from forerun.ray.prompt_keys import BLOCK_TOKENS
from forerun.server.engines.routing import Load, Router

CACHE_TOKENS = 1 << 20  # of a replica's prefix cache: how many are remembered


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Chooses by the keys that are the first argument of a call."""

    def initialize_state(self, **_: Any) -> None:
        """Called by Serve once, before requests."""
        self._prefixes = Router[Any]("cache_aware", BLOCK_TOKENS)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """The best one, then all others: Serve asks these if it has no room."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        for replica in replicas:
            if replica not in self._prefixes:
                self._prefixes.add(replica, CACHE_TOKENS)
        queues = self.replica_queue_len_cache
        loads = {replica: Load(queues.get(replica) or 0) for replica in replicas}
        keys = pending_request.args[0] if pending_request is not None else []
        tokens = len(keys) * BLOCK_TOKENS
        best = replicas[self._prefixes.choose_by_keys(keys, tokens, loads).replica]
        return [[best], [replica for replica in candidate_replicas if replica is not best]]

    def update_replicas(self, replicas: list[Any]) -> None:
        """Replicas have come or gone."""
        super().update_replicas(replicas)
        self._prefixes.keep([replica.replica_id for replica in replicas])
