"""Errors name parameters as the client did: APIs have other names for those of the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from forerun.core.errors import RequestError


@contextmanager
def in_client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Changes the names in errors of requests.

    Args:
        names: the engine's name of a parameter → the client's.
    """
    try:
        yield
    except RequestError as error:
        ours = "|".join(names)
        message = re.sub(rf"\b({ours})\b", lambda found: names[found[0]], str(error))
        raise type(error)(message) from None
