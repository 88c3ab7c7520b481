"""Logging of both processes: plain lines on standard error. No prompts, no answers."""

from __future__ import annotations

import logging


def set_up_logging(level: str) -> None:
    """`level`: of Forerun's loggers; other libraries only warn."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("forerun").setLevel(level.upper())
