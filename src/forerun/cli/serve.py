"""`forerun serve`: an HTTP server with OpenAI's API and SGLang's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy  # noqa: F401  before torch, whose C code swallows errors of this import
import typer

from forerun.cli.flags import Flag, Values, engine_flags, with_flags
from forerun.cli.output import dim, print_error
from forerun.server.settings import ServerSettings


def server_flags() -> list[Flag]:
    """Every field of `ServerSettings`."""
    return [
        Flag(
            spec.name,
            spec.metadata["type"],
            spec.default,
            spec.metadata["help"],
            "Server",
        )
        for spec in ServerSettings.specs()
    ]


@with_flags(server=server_flags, engine=engine_flags)
def serve(*, server: Values, engine: Values) -> None:
    """Serves a model over HTTP: OpenAI's API, and SGLang's native one.

    SIGTERM and Ctrl-C end it after the requests in flight; a second one ends it at once. With
    --node-rank above 0 there is no server here: the machine's GPUs work for the one on node 0.
    """
    settings = ServerSettings.of(server)
    # Slow imports, after the check above.
    from forerun.llm.setup import checked_config, with_models
    from forerun.server.engines.node import run_node
    from forerun.server.http.errors import ServerStartError
    from forerun.server.run import run_server

    config = checked_config(engine)
    if settings.served_model_name is None:  # the name as given: paths are made local below
        settings = replace(settings, served_model_name=config.model_path)
    config, target = with_models(config)
    if config.node_rank > 0:
        raise typer.Exit(run_node(settings, config, target))

    def on_ready(url: str, explain: Mapping[str, Any]) -> None:
        for line in chosen(explain):
            dim(line)
        print(f"Forerun is ready: {url}", flush=True)

    try:
        code = run_server(settings, config, target, on_ready)
    except ServerStartError as error:
        print_error(str(error))
        code = 1
    raise typer.Exit(code)


def chosen(explain: Mapping[str, Any]) -> list[str]:
    """What was chosen at start, in a few lines."""
    backends = {
        phase: reasons.splitlines()[0].partition(":")[0]
        for phase, reasons in explain["attention"].items()
    }
    attention = ", ".join(f"{phase} {backend}" for phase, backend in backends.items())
    return [
        f"{explain['architecture']} on {explain['device']}, {explain['dtype']};"
        f" {explain['algorithm']}, up to {explain['num_verify_tokens']} tokens per verify step",
        f"attention: {attention}",
        f"K/V cache: {explain['kv']} ({explain['kv_cache_dtype']}); up to {explain['slots']}"
        f" running requests of {explain['context_length']} tokens",
        f"replicas: {explain['replicas']}",
        f"tool calls: {explain['tools']}; reasoning: {explain['reasoning']}",
        f"grammars: {explain['grammars']}",
    ]
