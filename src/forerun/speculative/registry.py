"""The table of algorithms: the only place that names them.

A plugin calls `register_algorithm`, or declares an entry point in its package:

    [project.entry-points."forerun.algorithms"]
    LOOKBACK = "forerun_lookback:Lookback"
"""

from __future__ import annotations

import logging
import multiprocessing
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from forerun.core.errors import ConfigError, nearest
from forerun.speculative.base import Option, SpeculativeAlgorithm
from forerun.speculative.check import check_class
from forerun.speculative.joined import join

log = logging.getLogger("forerun")
GROUP = "forerun.algorithms"
BUILT_IN = {
    "NONE": "forerun.speculative.plain:Plain",
    "DFLASH": "forerun.speculative.dflash:DFlash",
    "DDTREE": "forerun.speculative.ddtree:DDTree",
    "EAGLE": "forerun.speculative.eagle:Eagle",
    "EAGLE3": "forerun.speculative.eagle3:Eagle3",
    "FROZEN_KV_MTP": "forerun.speculative.frozen_kv_mtp:FrozenKVMTP",
    "NEXTN": "forerun.speculative.nextn:NextN",
    "NGRAM": "forerun.speculative.ngram:Ngram",
    "STANDALONE": "forerun.speculative.standalone:Standalone",
    "SUFFIX": "forerun.speculative.suffix:Suffix",
}
# The field's names of drafts that one algorithm serves: the checkpoint says which head it has.
ALIASES = {"DSPARK": "DFLASH", "DOMINO": "DFLASH"}
IN_EVERY_PROCESS = (
    " This process has imported your script again: call register_algorithm outside of"
    ' `if __name__ == "__main__":`, or declare an entry point.'
)
_NAME = re.compile(r"[A-Z][A-Z0-9]*([-_][A-Z0-9]+)*")

Algorithm = type[SpeculativeAlgorithm]


class Registry:
    """Built-in algorithms, registered classes, and entry points of installed packages.

    A broken package is an error for users of its algorithm, and one warning for all others.
    """

    def __init__(self, built_in: Mapping[str, str], points: Iterable[EntryPoint]) -> None:
        self._points = {name: EntryPoint(name, path, GROUP) for name, path in built_in.items()}
        self._owners = dict.fromkeys(built_in, "Forerun")
        self._classes: dict[str, Algorithm] = {}  # imported and checked
        self._broken: dict[str, ConfigError] = {}
        for point in sorted(points, key=lambda point: point.name.upper()):
            owner = f"package {point.dist.name} {point.dist.version}" if point.dist else point.value
            try:
                self._points[self._claim(point.name, owner)] = point
            except ConfigError as error:
                self._set_aside(point.name.upper(), error)

    def register(self, name: str, cls: Algorithm) -> None:
        """See `register_algorithm`."""
        check_class(name, cls, self._loaded())
        self._classes[self._claim(name, f"{cls.__module__}.{cls.__qualname__}")] = cls

    def names(self) -> list[str]:
        """The available algorithms, without those of broken packages."""
        return [name for name in self._owners if name not in self._broken]

    def get(self, name: str | None) -> Algorithm:
        """See `get_algorithm`."""
        first, comma, second = ("NONE" if name is None else name).partition(",")
        if comma:
            if not first.strip() or not second.strip():
                raise ConfigError(
                    f"speculative_algorithm {name!r} names one algorithm and a comma; write A, or"
                    " A,B for two together."
                )
            return join(self.get(first.strip()), self.get(second.strip()))
        key = first.upper()
        key = ALIASES.get(key, key)
        if key in self._broken:
            raise self._broken[key]
        if key not in self._owners:
            known = self.names()
            in_main = multiprocessing.parent_process() is None
            raise ConfigError(
                f"Unknown speculative_algorithm {name!r}.{nearest(str(name), known)}"
                f" Known: {', '.join(known)}.{'' if in_main else IN_EVERY_PROCESS}"
            )
        if key not in self._classes:
            others = [] if key in BUILT_IN else self._loaded()
            self._classes[key] = check_class(key, self._import(key), others)
        return self._classes[key]

    def options(self) -> list[Option]:
        """See `all_options`."""
        options: dict[str, Option] = {}
        for name in self.names():
            try:
                options |= {option.name: option for option in self.get(name).options}
            except ConfigError as error:
                self._set_aside(name, error)
        return list(options.values())

    def _claim(self, name: object, owner: str) -> str:
        """Reserves a name for `owner`; returns it in upper case.

        Raises:
            ConfigError: the name is invalid, reserved or taken.
        """
        key = name.upper() if isinstance(name, str) else ""
        if not _NAME.fullmatch(key):
            raise ConfigError(
                f"{owner} names an algorithm {name!r}: a name is letters and digits, a letter"
                " first, with - or _ between them."
            )
        if key in BUILT_IN or key in ALIASES:
            raise ConfigError(f"{owner}: the name {key} is reserved; choose another.")
        if key in self._owners:
            raise ConfigError(
                f"{owner}: {self._owners[key]} has an algorithm named {key} already; choose another"
                " name, or uninstall one of the two."
            )
        self._owners[key] = owner
        return key

    def _import(self, name: str) -> object:
        point = self._points[name]
        try:
            return point.load()
        except (Exception, SystemExit) as error:  # a plugin's code may raise anything
            log.debug("algorithm %s", name, exc_info=error)
            raise ConfigError(
                f"Algorithm {name} of {self._owners[name]} ({point.value}) does not import:"
                f" {type(error).__name__}: {error}. Fix or uninstall it."
            ) from error

    def _loaded(self) -> list[Algorithm]:
        """All built-in algorithms and the plugins imported so far."""
        for name in BUILT_IN.keys() & self._owners.keys():
            self.get(name)
        return list(self._classes.values())

    def _set_aside(self, name: str, error: ConfigError) -> None:
        if name not in BUILT_IN:
            self._broken[name] = error
        log.warning("%s Everything else works without it.", error)


@cache
def _registry() -> Registry:
    """The registry of this process; packages are searched once."""
    return Registry(BUILT_IN, entry_points(group=GROUP))


def register_algorithm(name: str, cls: Algorithm) -> None:
    """Adds an algorithm under `name` (any case).

    Raises:
        ConfigError: the name is taken or reserved, or the class lacks or misdeclares something.
    """
    _registry().register(name, cls)


def algorithm_names() -> list[str]:
    """The available algorithms, plugins last."""
    return _registry().names()


def get_algorithm(name: str | None) -> Algorithm:
    """The class for a `speculative_algorithm` setting (any case); None is plain decoding.

    "A,B" is both together: see `joined.py`.

    Raises:
        ConfigError: there is none, or its package is broken; says why.
    """
    return _registry().get(name)


def all_options() -> list[Option]:
    """Options declared by any algorithm. A broken package is left out, with a warning."""
    return _registry().options()
