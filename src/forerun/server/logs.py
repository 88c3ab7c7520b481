"""Logging of both processes, on standard error: plain lines or JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

LOG_FORMATS = ("plain", "json")


class Event:
    """A log message with fields: JSON keeps them apart, plain lines have name=value."""

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self.name, self.fields = name, fields

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{k}={_plain(v)}" for k, v in self.fields.items())])


def _plain(value: Any) -> str:
    """Quoted unless it is one word: what clients send cannot make a line look like two."""
    if isinstance(value, float):
        return f"{value:.6g}"
    shown = str(value)
    bare = shown.isascii() and shown.isprintable() and not set(' "=') & set(shown)
    return shown if shown and bare else json.dumps(value, default=str)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        if isinstance(record.msg, Event):
            line |= {"message": record.msg.name, **record.msg.fields}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(level: str, log_format: str = "plain") -> None:
    """
    Args:
        level: of Forerun's loggers; other libraries only warn.
        log_format: one of `LOG_FORMATS`.
    """
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else plain)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("forerun").setLevel(level.upper())
