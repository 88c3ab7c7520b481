"""Command-line flags generated from settings, algorithm options and sampling parameters.

A command declares its own parameters and marks where generated ones go:

    @with_flags(engine=engine_flags, sampling=sampling_flags)
    def generate(prompts: ..., *, engine: Values, sampling: Values) -> None: ...

Each named parameter is replaced by its flags in the command's signature. When the command runs, it
receives a dict of the values that differ from the defaults.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from forerun.config.engine_config import EngineConfig
from forerun.core.errors import RequestError
from forerun.core.sampling_params import SamplingParams, param_of

Values = dict[str, Any]


@dataclass(frozen=True)
class Flag:
    """One generated flag; its value is parsed to `type` (bool, int, float, str, list)."""

    name: str  # the keyword, with underscores
    type: Any
    default: Any
    help: str
    panel: str
    parse: Callable[[Any], Any] | None = None  # from what typer has parsed, where it is given

    @property
    def spelling(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def has_off(self) -> bool:
        """A switch that `--no-...` turns off: it is on by default, or what it is is decided later
        (None)."""
        return self.type is bool and self.default is not False

    def parameters(self) -> list[inspect.Parameter]:
        """Makes typer's parameters. Of a switch that is on, help lists `--no-...` alone, and of one
        that is decided later the other: both names would not fit on a terminal of 80 columns."""
        off, is_on = f"--no-{self.spelling[2:]}", self.type is bool and self.default is True
        option = typer.Option(
            off if is_on else self.spelling,
            help=f"Turn off (default: on): {self.help}" if is_on else self.help,
            rich_help_panel=self.panel,
            show_default=self.type is not bool,
        )
        if self.has_off:
            accepted = typer.Option(self.spelling if is_on else off, hidden=True)
            shown, hidden = (OFF, "") if is_on else ("", OFF)
            return [
                _keyword(shown + self.name, False, Annotated[bool, option]),
                _keyword(hidden + self.name, False, Annotated[bool, accepted]),
            ]
        kind = self.type | None if self.default is None else self.type
        return [_keyword(self.name, self.default, Annotated[kind, option])]

    def take(self, values: Values) -> Any:
        """Takes its value out of the parsed command line."""
        value = values.pop(self.name)
        if self.has_off:
            return False if values.pop(OFF + self.name) else value or self.default
        return self.parse(value) if self.parse is not None and value != self.default else value


OFF = "no_"  # prefix of the parameter that turns a switch off


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def engine_flags() -> list[Flag]:
    """Every engine setting, and the options of registered algorithms."""
    # Imports torch, so only for commands with engine flags.
    from forerun.speculative.registry import algorithm_names, all_options

    hints = get_type_hints(EngineConfig)
    options = all_options()  # first: it drops broken packages, whose names must not be listed
    flags = []
    for spec in EngineConfig.settings():
        choices = spec.metadata.get("choices")
        if spec.name == "speculative_algorithm":
            choices = algorithm_names()
        listed = f" ({', '.join(map(str, choices))})" if choices else ""
        flags.append(
            Flag(
                spec.name,
                value_type(hints[spec.name]),
                spec.default,
                spec.metadata["help"] + listed,
                "Speculation" if spec.name.startswith("speculative_") else "Engine",
            )
        )
    for option in options:
        flags.append(Flag(option.name, option.type, option.default, option.help, "Speculation"))
    return flags


def engine_flags_without(*names: str) -> Callable[[], list[Flag]]:
    """Engine flags of a command that sets these itself."""
    return lambda: [flag for flag in engine_flags() if flag.name not in names]


def sampling_flags(**defaults: Any) -> list[Flag]:
    """Every field of `SamplingParams`; `defaults` override its own."""
    hints = get_type_hints(SamplingParams)
    flags = []
    for spec in fields(SamplingParams):
        default: Any = defaults.get(spec.name, spec.default)
        kind = value_type(hints[spec.name])
        if get_origin(kind) is list:
            default = list(default)
        parse = _parse_biases if spec.name == "logit_bias" else None
        flags.append(Flag(spec.name, kind, default, param_of(spec).help, "Sampling", parse))
    return flags


def config_flags(config: type[Any]) -> list[Flag]:
    """Every field of a dataclass whose fields have defaults, and metadata "help" and "panel"."""
    hints, defaults = get_type_hints(config), vars(config())
    flags = []
    for spec in fields(config):
        kind, default = value_type(hints[spec.name]), defaults[spec.name]
        if get_origin(kind) is list:
            default = list(default)
        flags.append(Flag(spec.name, kind, default, spec.metadata["help"], spec.metadata["panel"]))
    return flags


def _parse_biases(given: list[str]) -> dict[str, float]:
    """`["5:1.5"]` -> `{"5": 1.5}`."""
    biases = {}
    for text in given:
        token, _, bias = text.partition(":")
        try:
            biases[token] = float(bias)
        except ValueError:
            raise RequestError(f"--logit-bias must be TOKEN_ID:BIAS, got {text!r}.") from None
    return biases


def with_flags(
    **groups: Callable[[], Iterable[Flag]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces the parameters named in `groups` by generated flags (see the module docstring)."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        generated = {group: {f.name: f for f in make()} for group, make in groups.items()}
        own = [
            p.replace(annotation=hint) for p, hint in _annotated(function) if p.name not in groups
        ]
        flags = [flag for group in generated.values() for flag in group.values()]

        @wraps(function)
        def command(**values: Any) -> None:
            for group, members in generated.items():
                given = {name: flag.take(values) for name, flag in members.items()}
                values[group] = _changed(given, members)
            function(**values)

        parameters = [*own, *(p for flag in flags for p in flag.parameters())]
        vars(command)["__signature__"] = inspect.Signature(parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _annotated(function: Callable[..., None]) -> list[tuple[inspect.Parameter, Any]]:
    hints = get_type_hints(function, include_extras=True)
    return [(p, hints[p.name]) for p in inspect.signature(function).parameters.values()]


def _changed(given: Mapping[str, Any], flags: Mapping[str, Flag]) -> Values:
    return {name: value for name, value in given.items() if value != flags[name].default}


def value_type(hint: Any) -> Any:
    """The type on the command line: `int | None` → int, `tuple[str, ...]` → list[str].

    Of pairs: list[str], to be parsed.
    """
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is tuple:
        (item, *_) = get_args(hint)
        return types.GenericAlias(list, (str if get_origin(item) is tuple else item,))
    return hint
