"""A node other than node 0: its ranks run the plans of the engine on node 0.

    engine  --shared memory-->  ranks of node 0
       |
       '--TCP-->  this process  --shared memory-->  ranks of this node

This process passes the engine's messages on to its ranks, and tells when one of them ends. Where
the connection is lost, both sides end their ranks.
"""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import ConfigError
from forerun.executor.ranks.join import join, lost, raise_end
from forerun.executor.ranks.link import Link
from forerun.executor.ranks.local import LocalRanks, RankGone
from forerun.executor.ranks.messages import CLOSE, FAILED, REFUSED
from forerun.executor.ranks.rank import rank_tasks
from forerun.executor.ranks.remote import ANSWER, GONE, GRAMMAR, READY


def host_ranks(config: EngineConfig, model_path: Path) -> None:
    """Runs until the engine on node 0 is closed.

    Raises:
        ConfigError: the nodes do not find each other or differ, or the settings cannot work.
        ExecutorError: the engine has failed, or node 0 is gone.
    """
    link, start = join(config, model_path)
    tasks = rank_tasks(config, model_path, start.overlap_depth, start.store_port)
    host = _Host(config, link)
    ranks = LocalRanks.start(tasks, host.ranks_ended)
    try:
        host.run(ranks)
    finally:
        ranks.close()
        link.close()


class _Host:
    """Passes messages between node 0 and the ranks of this node."""

    def __init__(self, config: EngineConfig, link: Link) -> None:
        assert config.nodes.address is not None
        self._address, self._link = config.nodes.address, link
        self._grammars: SimpleQueue[bytes] = SimpleQueue()
        self._cause: Exception | None = None  # why the ranks have ended

    def ranks_ended(self, cause: Exception) -> None:
        """Tells node 0; a thread of `LocalRanks` calls it."""
        self._cause = cause
        tag = FAILED
        if isinstance(cause, ConfigError | RankGone):
            tag = REFUSED if isinstance(cause, ConfigError) else GONE
        try:
            self._link.send_bytes(tag + str(cause).encode())
        except OSError:
            return  # node 0 is gone too
        finally:
            self._link.close()  # `run` ends

    def run(self, ranks: LocalRanks) -> None:
        threading.Thread(target=self._answer, args=(ranks,), daemon=True).start()
        try:
            while (message := self._link.recv_bytes()) != CLOSE:
                raise_end(message)
                if message[:1] == GRAMMAR:
                    self._grammars.put(message[1:])
                else:
                    ranks.send(message)
        except (EOFError, OSError) as error:
            raise self._cause or lost(self._address, error) from error

    def _answer(self, ranks: LocalRanks) -> None:
        """Body of a thread: what takes the ranks long."""
        try:
            ranks.wait_ready()
            self._link.send_bytes(READY)
            while True:
                ranks.send_grammar(self._grammars.get())
                self._link.send_bytes(ANSWER + ranks.receive_grammar())
        except (EOFError, OSError):
            return  # the ranks or node 0 have ended: `run` raises why
