"""The table of algorithms: the only place where their names stand.

A name maps to a class or to "module:Class" (imported when asked). Others add theirs with
`register_algorithm` or through the entry-point group `forerun.algorithms`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from importlib.metadata import entry_points

from forerun.core.errors import ConfigError, nearest
from forerun.speculative.base import Option, SpeculativeAlgorithm

log = logging.getLogger("forerun")
GROUP = "forerun.algorithms"
_BUILT_IN = {
    "NONE": "forerun.speculative.plain:Plain",
    "DFLASH": "forerun.speculative.dflash:DFlash",
    "EAGLE3": "forerun.speculative.eagle3:Eagle3",
    "NEXTN": "forerun.speculative.nextn:NextN",
    "NGRAM": "forerun.speculative.ngram:Ngram",
    "STANDALONE": "forerun.speculative.standalone:Standalone",
}
_table: dict[str, str | type[SpeculativeAlgorithm]] = dict(_BUILT_IN)


def register_algorithm(name: str, cls: type[SpeculativeAlgorithm]) -> None:
    """Adds an algorithm under `name` (any case).

    Raises:
        ConfigError: the name is taken, or the class is not a complete algorithm.
    """
    key = name.upper()
    if key in _table:
        raise ConfigError(
            f"An algorithm named {name!r} is registered already; choose another name."
        )
    _check(name, cls)
    _table[key] = cls


def algorithm_names() -> list[str]:
    return [*_table, *(name for name in _plugins() if name not in _table)]


def get_algorithm(name: str | None) -> type[SpeculativeAlgorithm]:
    """The class for a `speculative_algorithm` setting; None is plain decoding."""
    key = (name or "NONE").upper()
    target = _table.get(key)
    if target is None and key in _plugins():
        cls = _import(_plugins()[key], name=key)
        register_algorithm(key, cls)
        return cls
    if target is None:
        names = algorithm_names()
        raise ConfigError(
            f"Unknown speculative_algorithm {name!r}.{nearest(str(name), names)}"
            f" Known: {', '.join(names)}."
        )
    return _import(target, name=key) if isinstance(target, str) else target


def all_options() -> list[Option]:
    """Settings declared by any algorithm; a name may be shared if the declarations agree."""
    options: dict[str, Option] = {}
    for name in algorithm_names():
        try:
            declared = get_algorithm(name).options
        except ConfigError as error:  # a broken plugin must not block those who do not use it
            log.warning("%s Its options are unknown.", error)
            continue
        for option in declared:
            if options.setdefault(option.name, option) != option:
                raise ConfigError(f"{name} declares {option.name!r} unlike another algorithm.")
    return list(options.values())


def _plugins() -> dict[str, str]:
    return {point.name.upper(): point.value for point in entry_points(group=GROUP)}


def _import(path: str, name: str) -> type[SpeculativeAlgorithm]:
    module, _, attribute = path.partition(":")
    try:
        cls = vars(importlib.import_module(module))[attribute]
    except (ImportError, KeyError) as error:
        raise ConfigError(f"Algorithm {name} ({path}) does not import: {error}.") from error
    _check(name, cls)
    return cls  # type: ignore[no-any-return]


def _check(name: str, cls: object) -> None:
    if not (inspect.isclass(cls) and issubclass(cls, SpeculativeAlgorithm)):
        raise ConfigError(f"Algorithm {name}: {cls!r} is not a subclass of SpeculativeAlgorithm.")
    missing = sorted(cls.__abstractmethods__)
    if missing:
        raise ConfigError(f"Algorithm {name}: {cls.__name__} lacks {', '.join(missing)}.")
