"""The table of algorithms: the only place where their names stand.

A name maps to a class or to "module:Class" (imported when asked). Others add theirs with
`register_algorithm`, or in a package with the entry-point group `forerun.algorithms`:

    [project.entry-points."forerun.algorithms"]
    SUFFIX = "forerun_suffix:Suffix"
"""

from __future__ import annotations

import importlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import chain

from forerun.core.errors import ConfigError, nearest
from forerun.speculative.base import Option, SpeculativeAlgorithm
from forerun.speculative.check import check_class, check_name, check_shared_options

log = logging.getLogger("forerun")
GROUP = "forerun.algorithms"
_BUILT_IN = {
    "NONE": "forerun.speculative.plain:Plain",
    "DFLASH": "forerun.speculative.dflash:DFlash",
    "DDTREE": "forerun.speculative.ddtree:DDTree",
    "EAGLE3": "forerun.speculative.eagle3:Eagle3",
    "NEXTN": "forerun.speculative.nextn:NextN",
    "NGRAM": "forerun.speculative.ngram:Ngram",
    "STANDALONE": "forerun.speculative.standalone:Standalone",
}
# Not for others, though not all are here yet: users know them from SGLang.
_RESERVED = {*_BUILT_IN, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DDTREE"}

Algorithm = type[SpeculativeAlgorithm]


class Registry:
    """The built-in algorithms, those registered by hand, and those of installed packages.

    A package that is broken troubles only those who ask for it: others are warned, once.
    """

    def __init__(self, built_in: Mapping[str, str], points: Iterable[EntryPoint]) -> None:
        self._built_in = built_in
        self._known: dict[str, Algorithm] = {}  # imported and checked
        self._broken: dict[str, ConfigError] = {}
        self._points: dict[str, list[EntryPoint]] = defaultdict(list)
        for point in points:
            self._points[point.name.upper()].append(point)
        for name in sorted(self._points):
            try:
                self._check_point(name)
            except ConfigError as error:
                self._refuse(name, error)

    def register(self, name: str, cls: Algorithm) -> None:
        """See `register_algorithm`."""
        key = check_name(name)
        if key in _RESERVED:
            raise ConfigError(f"The name {key} is reserved; choose another name.")
        if key in self._points:
            raise ConfigError(
                f"An algorithm named {key} comes with {_owners(self._points[key])} already; choose"
                " another name, or uninstall that."
            )
        if key in self._known:
            raise ConfigError(
                f"An algorithm named {key} is registered already ({_path(self._known[key])});"
                " choose another name."
            )
        self._known[key] = self._checked(key, cls)

    def names(self) -> list[str]:
        """All that can be asked for; broken packages are not among them."""
        names = dict.fromkeys(chain(self._built_in, self._known, sorted(self._points)))
        return [name for name in names if name not in self._broken]

    def get(self, name: str | None) -> Algorithm:
        """See `get_algorithm`."""
        key = (name or "NONE").upper()
        if key in self._known:
            return self._known[key]
        if key in self._built_in:
            self._known[key] = check_class(key, _load(self._built_in[key]))
        elif key in self._broken:
            raise self._broken[key]
        elif key in self._points:
            self._known[key] = self._import(key)
        else:
            names = self.names()
            raise ConfigError(
                f"Unknown speculative_algorithm {name!r}.{nearest(str(name), names)}"
                f" Known: {', '.join(names)}."
            )
        return self._known[key]

    def options(self) -> list[Option]:
        """See `all_options`."""
        options: dict[str, Option] = {}
        for name in self.names():
            try:
                cls = self.get(name)
            except ConfigError as error:
                self._refuse(name, error)
                continue
            options |= {option.name: option for option in cls.options}
        return list(options.values())

    def _check_point(self, name: str) -> None:
        """What can be said without importing it."""
        points = self._points[name]
        check_name(name)
        if name in _RESERVED:
            raise ConfigError(
                f"{_owners(points)} gives an algorithm the reserved name {name}; its author must"
                " choose another."
            )
        if len(points) > 1:
            raise ConfigError(
                f"{_owners(points)} each give an algorithm named {name}; uninstall one of them."
            )

    def _import(self, name: str) -> Algorithm:
        point = self._points[name][0]
        where = f"Algorithm {name} of {_owners([point])} ({point.value})"
        try:
            cls = _load(point.value)
        except (Exception, SystemExit) as error:  # anybody's code
            log.debug("%s", where, exc_info=error)
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{where} does not import: {why}. Mend or uninstall it.") from error
        return self._checked(name, cls)

    def _checked(self, name: str, cls: object) -> Algorithm:
        algorithm = check_class(name, cls)
        for built_in in self._built_in:
            self.get(built_in)
        check_shared_options(name, algorithm, self._known.values())
        return algorithm

    def _refuse(self, name: str, error: ConfigError) -> None:
        self._broken[name] = error
        log.warning("%s Everything else works without it.", error)


def _load(path: str) -> object:
    """What "module:attribute" names."""
    module, colon, attribute = path.partition(":")
    if not (colon and attribute.isidentifier()):
        raise ImportError(f'expected "module:Class", got {path!r}')
    members = vars(importlib.import_module(module))
    if attribute not in members:
        raise ImportError(f"{module} has no {attribute}")
    return members[attribute]


def _owners(points: Iterable[EntryPoint]) -> str:
    return " and ".join(
        f"package {p.dist.name} {p.dist.version}" if p.dist else f"an entry point ({p.value})"
        for p in points
    )


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def _registry() -> Registry:
    """The process's own; packages are looked for once."""
    return Registry(_BUILT_IN, entry_points(group=GROUP))


def register_algorithm(name: str, cls: Algorithm) -> None:
    """Adds an algorithm under `name` (any case).

    Raises:
        ConfigError: the name is taken or reserved, or the class lacks or misdeclares something.
    """
    _registry().register(name, cls)


def algorithm_names() -> list[str]:
    """All that `get_algorithm` knows, packages' algorithms last."""
    return _registry().names()


def get_algorithm(name: str | None) -> Algorithm:
    """The class for a `speculative_algorithm` setting (any case); None is plain decoding.

    Raises:
        ConfigError: there is none, or its package is broken; says why.
    """
    return _registry().get(name)


def all_options() -> list[Option]:
    """Settings declared by any algorithm. A package that is broken is left out, with a warning."""
    return _registry().options()
