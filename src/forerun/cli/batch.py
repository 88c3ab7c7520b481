"""`forerun batch`: requests from a file, in OpenAI's batch format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy  # noqa: F401  before torch, whose C code swallows errors of this import
import typer

from forerun.cli.flags import Flag, Values, engine_flags, with_flags
from forerun.cli.output import dim, print_error, progress_bar
from forerun.cli.serve import server_flags
from forerun.core.errors import ConfigError
from forerun.server.settings import ServerSettings

if TYPE_CHECKING:
    from forerun.server.batches.runner import Counts

USED = (
    "served_model_name", "tool_call_parser", "reasoning_parser", "max_body_bytes", "max_n",
    "dp_size", "load_balance_method", "request_timeout", "watchdog_timeout", "log_format",
)  # fmt: skip
Source = Annotated[Path, typer.Argument(metavar="INPUT", help="Requests, one JSON object a line")]
Output = Annotated[Path, typer.Option("--output", help="Results; one that is there goes on")]


def batch_flags() -> list[Flag]:
    """Makes those flags of `forerun serve` that matter without a server."""
    return [flag for flag in server_flags() if flag.name in USED]


@with_flags(server=batch_flags, engine=engine_flags)
def batch(source: Source, output: Output, *, server: Values, engine: Values) -> None:
    """Answers the requests of a file, in OpenAI's batch format.

    A line of INPUT is {"custom_id", "method": "POST", "url", "body"}; url is /v1/chat/completions,
    /v1/completions, /v1/responses or /v1/embeddings. Killed, the same command goes on where it was.
    """
    settings = ServerSettings.of(server)
    if not source.is_file():
        raise ConfigError(f"input {str(source)!r} is not a file.")
    # Slow imports, after the checks above.
    from forerun.llm.setup import checked_config, with_models
    from forerun.server.batches.offline import Files, run_offline
    from forerun.server.http.errors import ServerStartError

    config = checked_config(engine)
    if settings.served_model_name is None:  # the name as given: paths are made local below
        settings = replace(settings, served_model_name=config.model_path)
    config, target = with_models(config)
    with progress_bar(quiet=False) as progress:
        bar = progress.add_task("requests", total=None)

        def on_progress(counts: Counts) -> None:
            ended = counts.completed + counts.failed
            progress.update(bar, total=counts.total, completed=ended)

        try:
            counts = run_offline(settings, config, target, Files(source, output), on_progress)
        except ServerStartError as error:
            print_error(str(error))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            dim("Stopped; the same command goes on from here.")
            raise
    dim(f"{counts.completed} of {counts.total} requests answered, {counts.failed} errors: {output}")
    if counts.failed:
        raise typer.Exit(1)
