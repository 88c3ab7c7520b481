"""The base of formats whose calls are JSON objects with a name."""

from __future__ import annotations

from forerun.server.parsers.call_object import CallObject
from forerun.server.parsers.json_object import Malformed
from forerun.server.parsers.scanner import Reading
from forerun.server.parsers.tool_parser import ToolParser


class ObjectCallParser(ToolParser):
    def _objects(self) -> Reading[None]:
        """Calls one after another, or a list of them. A list may end before its bracket.

        Raises:
            Malformed: something else.
        """
        yield from self._spaces()
        if self._char != "[":
            yield from self._object()
            yield from self._spaces()
            while self._char == "{":
                yield from self._object()
                yield from self._spaces()
            return
        word = yield from self._literal("[")
        while word in ("[", ","):
            yield from self._spaces()
            yield from self._object()
            word = yield from self._closing(",", "]")

    def _object(self) -> Reading[None]:
        """One call.

        Raises:
            Malformed: something else.
        """
        call = CallObject()
        while not call.done:
            if not self._char:
                raise Malformed
            call.push(self._char)
            if call.name is not None and self._announced is None:
                self._announce(call.name)
            self._argue(call.take())
            yield from self._consume()
        self._complete()
