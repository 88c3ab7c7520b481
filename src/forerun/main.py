"""The `forerun` command. Only the subcommand in use is imported.

Exit codes: 0 success, 1 a check or the engine failed, 2 bad input (one line on stderr),
130 Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TextIO

import typer

from forerun import __version__
from forerun.core.errors import (
    AlgorithmError,
    ConfigError,
    EngineClosedError,
    ExecutorError,
    RequestError,
    nearest,
    shown,
)
from forerun.core.unsupported import setting_refusal

# The class moved between releases of typer and click; its grandchild is public in all of them.
ClickException: Any = typer.BadParameter.__mro__[2]

NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


@dataclass(frozen=True)
class Entry:
    """A command: where it lives ("module:attribute", a function or a typer app) and its help."""

    target: str
    help: str
    builds: bool = False  # the target makes the app, from the name of the subcommand in use
    extra: str | None = None  # that brings it, if it is not of the wheel
    folder: str | None = None  # of the repository, for the same

    def load(self, subcommand: str | None = None) -> Any:
        """The command: a function, or a typer app."""
        import numpy  # noqa: F401  before torch, whose C code swallows errors of this import

        module, _, attribute = self.target.partition(":")
        try:
            found = vars(import_module(module))[attribute]
        except ModuleNotFoundError as error:
            if self.extra is None or error.name != module.partition(".")[0]:
                raise
            raise ConfigError(
                f"this command is a package of its own: pip install 'forerun[{self.extra}]', or"
                f" pip install ./{self.folder} in a checkout of Forerun."
            ) from None
        return found(subcommand) if self.builds else found


COMMANDS = {
    "demo": Entry(
        "forerun.cli.demo:demo", "The bundled models, plain and speculative side by side."
    ),
    "generate": Entry("forerun.cli.generate:generate", "Complete one prompt or many."),
    "chat": Entry("forerun.cli.chat:chat", "Talk with a model."),
    "serve": Entry(
        "forerun.cli.serve:serve", "Serve a model over HTTP, with OpenAI's API and SGLang's."
    ),
    "batch": Entry("forerun.cli.batch:batch", "Answer the requests of a file: OpenAI's batches."),
    "doctor": Entry(
        "forerun.doctor.command:doctor", "What this machine can run, and why not the rest."
    ),
    "bench": Entry(
        "forerun_bench.cli.app:build",
        "Measure speed, plain and speculative.",
        builds=True,
        extra="bench",
        folder="bench",
    ),
    "train": Entry(
        "forerun_train.cli.app:build",
        "Train drafts, and make and answer the data for it.",
        builds=True,
        extra="train",
        folder="training",
    ),
    "plan": Entry(
        "forerun.plan.command:plan", "Memory, speed and cost of a model on GPUs that are not here."
    ),
    "eval": Entry("forerun.cli.eval:app", "Measure quality and accept length."),
}


def build_app(chosen: str | None = None, subcommand: str | None = None) -> typer.Typer:
    """The app with the command `chosen` imported; the others are names and help lines.

    Of a group of commands, all are imported if `subcommand` is not one of them.
    """
    app = typer.Typer(
        name="forerun",
        help="Speculation-first LLM inference: same seed, same text, only faster.",
        no_args_is_help=False,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for name, entry in COMMANDS.items():
        target = entry.load(subcommand) if name == chosen else _not_loaded
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name, help=entry.help)
        else:
            app.command(name, help=entry.help)(target)
    return app


def run(args: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    words = [arg for arg in args if not arg.startswith("-")]
    command, subcommand = (*words[:2], None, None)[:2]
    try:
        if command is not None and command not in COMMANDS:
            raise ConfigError(
                f"unknown command {command!r}.{nearest(command, COMMANDS)}"
                f" Known: {', '.join(COMMANDS)}."
            )
        code = build_app(command, subcommand)(
            args=list(args), prog_name="forerun", standalone_mode=False
        )
        return code if isinstance(code, int) else 0
    except (ConfigError, RequestError) as error:
        return _refuse(str(error))
    except (AlgorithmError, EngineClosedError, ExecutorError) as error:
        return _refuse(str(error), code=1)
    except ClickException as error:
        return _refuse(_one_line(error, args))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _refuse(f"{shown(error.filename)} cannot be a path: {error.strerror}.")
    except (KeyboardInterrupt, typer.Abort):
        return 130


def main() -> None:
    """The command line of this process, which ends with it."""
    if sys.stdin is None:  # closed: nothing else may get its number
        sys.stdin = open(os.devnull)  # noqa: SIM115  for as long as the process lives
    if sys.stdout is None:
        sys.exit(_refuse("standard output is closed; redirect it to a file or to /dev/null."))
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `forerun ... | head`
        code = 0
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        code = _refuse(f"the output cannot be written: {error.strerror}.", code=1)
    else:
        sys.exit(code)
    _discard(sys.stdout)
    sys.exit(code)


def _discard(stream: TextIO) -> None:
    """What is left in its buffer goes nowhere, and is no error when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        typer.echo(f"forerun {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _not_loaded() -> None:
    raise AssertionError("a command that was not imported")


def _refuse(message: str, code: int = 2) -> int:
    try:
        print(f"forerun: error: {message}", file=sys.stderr)
    except OSError:  # standard error may be full too
        _discard(sys.stderr)
    return code


def _one_line(error: Any, args: Sequence[str]) -> str:
    """The parser's error, with the nearest known flag if there is one."""
    details = vars(error)
    message = str(error.format_message()).partition(" (Possible options")[0].rstrip(".") + "."
    close = details.get("possibilities") or []
    context, given = details.get("ctx"), details.get("option_name")
    if context is not None and given is not None:
        opts = {name for each in context.command.params for name in each.opts}
        known = {_keyword(name): name for name in opts if name.startswith("-")}
        typed = _as_typed(given, args)
        ours, why = setting_refusal(_keyword(typed), known, lambda name: known[name])
        if _is_decided(_keyword(typed), known):
            why = "this command sets it itself; leave it out"
        message = message.replace(f"{given}.", f"{typed}.")
        if why is not None:
            return f"{message.rstrip('.')}: {why}."
        if ours is not None:
            close = [known[ours]]
        elif typed != given:
            close = []
    commands = vars(context.command).get("commands") if context is not None else None
    if commands and given is None:  # of a group: none was given, or an unknown one
        return f"{message.replace('?.', '?')} Known: {', '.join(commands)}."
    if close:
        return f"{message} Did you mean {close[0]}?"
    path = "forerun" if context is None else context.command_path
    return f"{message} See: {path} --help"


def _is_decided(name: str, known: Collection[str]) -> bool:
    """Whether a setting of engines is none of a command that has the others."""
    from forerun.config.engine_config import EngineConfig

    settings = {each.name for each in EngineConfig.settings()}
    own = name.removeprefix("no_")
    return "page_size" in known and own in settings - set(known) and not own.endswith("_path")


def _keyword(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _as_typed(given: str, args: Sequence[str]) -> str:
    """The flag as it was typed: of `-tp`, the parser names the first letter that is none."""
    if given.startswith("--"):
        return given
    short = [arg.partition("=")[0] for arg in args if arg[:1] == "-" != arg[1:2]]
    return next((word for word in short if given[1:] in word), given)


if __name__ == "__main__":
    main()
