"""The base of formats whose calls are JSON objects with a name."""

from __future__ import annotations

from typing import ClassVar

from forerun.server.parsers.call_object import CallObject
from forerun.server.parsers.events import Arguments
from forerun.server.parsers.json_object import Malformed
from forerun.server.parsers.scanner import Reading
from forerun.server.parsers.tool_parser import ToolParser


class ObjectCallParser(ToolParser):
    argument_keys: ClassVar[tuple[str, ...]]

    def _object(self) -> Reading[None]:
        """One call.

        Raises:
            Malformed: something else.
        """
        call = CallObject(self.argument_keys)
        while not call.done:
            if not self._char:
                raise Malformed
            call.push(self._char)
            if call.name is not None and not self._announced:
                self._announce(call.name)
            self._events.append(Arguments(call.take()))
            yield from self._consume()
        self._complete()
