"""`forerun serve` on a node other than node 0: its ranks belong to the engine there."""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ExecutorError
from forerun.platform.stacks import offer_stacks
from forerun.server.engines.backoff import MAX_QUICK_DEATHS, Backoff
from forerun.server.engines.placement import place_replicas
from forerun.server.logs import set_up_logging
from forerun.server.settings import ServerSettings

log = logging.getLogger("forerun")


def run_node(settings: ServerSettings, config: EngineConfig, target: Path) -> int:
    """Runs until the server on node 0 ends. Joins again when that starts a new engine.

    Args:
        config: with local paths.
        target: folder of the target.

    Returns:
        The exit code.

    Raises:
        ConfigError: a setting or model cannot be used, or node 0 does not answer in time.
    """
    set_up_logging(config.log_level, settings.log_format)
    place_replicas(config, settings.dp_size)
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        offer_stacks(Path(folder))
        return _join_again_and_again(config, target)


def _join_again_and_again(config: EngineConfig, target: Path) -> int:
    from forerun.executor.ranks.host import host_ranks

    backoff = Backoff()
    while True:
        try:
            host_ranks(config, target)
            return 0
        except ExecutorError as error:
            delay = backoff.died()
            if delay is None:
                log.critical("%s It has died %d times in a row.", error, MAX_QUICK_DEATHS + 1)
                return 1
            log.error("%s This node joins again in %.1f s.", error, delay)
            time.sleep(delay)
            backoff.started()
