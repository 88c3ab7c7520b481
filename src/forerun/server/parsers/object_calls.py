"""The base of formats whose calls are JSON objects with a name."""

from __future__ import annotations

from forerun.server.parsers.call_object import CallObject
from forerun.server.parsers.json_object import Malformed
from forerun.server.parsers.scanner import Reading
from forerun.server.parsers.tool_parser import ToolParser


class ObjectCallParser(ToolParser):
    def _objects(self) -> Reading[None]:
        """Calls one after another, or a list of them. A list may end before its bracket.

        A malformed one in a list is text; the others are calls.

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
        yield from self._literal("[")
        yield from self._siblings(self._object)

    def _object(self) -> Reading[None]:
        """One call.

        Raises:
            Malformed: something else.
        """
        call = CallObject(tolerant=bool(self._marker))
        while not call.done:
            if not self._char:
                raise Malformed
            if self._char in "<]" and call.lacks_brace:
                break
            call.push(self._char)
            if call.name is not None and self._announced is None:
                self._announce(call.name)
            self._argue(call.take())
            yield from self._consume()
        self._complete()
