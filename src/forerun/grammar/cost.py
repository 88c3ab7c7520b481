"""Estimates from its source how long a grammar takes to compile. It may be wrong.

The compiler looks at the whole vocabulary for every place where many characters are possible, and
writes counts out. Objects take time that is quadratic in the number of their optional properties.
"""

from __future__ import annotations

import json
import re
from typing import Any

from forerun.grammar.compile_process import Job
from forerun.grammar.counts import REGEX_PARTS

# Seconds of CPU time, as measured with xgrammar 0.2.8.
PER_TOKEN = 5e-7  # of the vocabulary, and place where any of its tokens may come
PER_NODE, PER_PAIR = 4e-4, 3e-6  # of a schema's values; of optional properties
# Places that count as one of those:
_PLAIN, _REPEATED = 1e-3, 1 / 8  # a character; one within * or a count
_OF_EBNF = 1e-2  # a character of EBNF, which may be in a loop
_MANY = 26  # characters of a class with which most tokens are possible
_LARGEST = 1e9

_RANGE = re.compile(r"(\\u\w{4}|\\.|[^\\])-(\\u\w{4}|\\.|[^\\])", re.DOTALL)
_CLASS_OR_COUNT = re.compile(
    r'"(?:\\.|[^"\\])*"|#[^\n]*|(?P<class>\[(?:\\.|[^\]\\])*\])|\{\s*(?P<count>[\d,\s]+)\}',
    re.DOTALL,
)


def estimate(job: Job, vocab_size: int) -> float:
    """Seconds."""
    places, seconds = 0.0, 0.0
    if job.method == "compile_regex":
        places = _of_regex(job.source)
    elif job.method == "compile_grammar":
        places = _of_ebnf(job.source)
    else:
        places, seconds = _of_json(json.loads(job.source))
    return seconds + places * vocab_size * PER_TOKEN


def _of_json(value: Any) -> tuple[float, float]:
    """Places, and seconds beside them, of a schema or structural tag."""
    places = seconds = 0.0
    waiting = [value]
    while waiting:
        node = waiting.pop()
        seconds += PER_NODE
        if isinstance(node, str):
            places += _PLAIN * len(node)
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, dict):
            continue
        properties, required = node.get("properties"), node.get("required")
        if isinstance(properties, dict):
            number = len(properties) - (len(required) if isinstance(required, list) else 0)
            seconds += PER_PAIR * max(0, number) ** 2
        for key, each in node.items():
            if key == "pattern" and isinstance(each, str):
                places += _of_regex(each)
            elif key == "grammar" and isinstance(each, str):
                places += _of_ebnf(each)
            else:
                waiting.append(each)
        if isinstance(node.get("patternProperties"), dict):
            places += sum(map(_of_regex, node["patternProperties"]))
    return places, seconds


def _of_regex(pattern: str) -> float:
    totals, last = [[0.0, 0.0]], (0.0, 0.0)  # places and characters of groups that are open
    for match in REGEX_PARTS.finditer(pattern):
        if match["open"] is not None:
            totals.append([0.0, 0.0])
            continue
        if match["close"] is not None and len(totals) > 1:
            last = (totals[-1][0], totals.pop()[1])
        elif match["count"] is not None or match["many"] is not None:
            times = 1
            if match["count"] is not None:
                times = max(1, int(match["low"]), int(match["high"] or 0))
            repeated = times * max(last[0], last[1] * _REPEATED)
            totals[-1][0] += repeated - last[0]
            last = (repeated, times * last[1])
            continue
        else:
            last = (_of_unit(match[0]), 1.0)
        totals[-1][0] = min(_LARGEST, totals[-1][0] + last[0])
        totals[-1][1] = min(_LARGEST, totals[-1][1] + last[1])
    return sum(places for places, _ in totals)


def _of_unit(unit: str) -> float:
    """Returns the cost of one character, class or escape."""
    if unit[0] == "[":
        return _of_class(unit)
    return (
        1.0 if unit in (".", r"\w", r"\W", r"\S", r"\D") or unit[:2] in (r"\p", r"\P") else _PLAIN
    )


def _of_class(text: str) -> float:
    if text[1:2] == "^" or any(name in text for name in (r"\w", r"\W", r"\S", r"\D", r"\p", r"\P")):
        return 1.0
    size = len(text) - 2
    for low, high in _RANGE.findall(text[1:-1]):
        size += abs(ord(high[-1]) - ord(low[-1])) if len(low) == len(high) == 1 else _MANY
    return float(min(1.0, (size / _MANY) ** 3))


def _of_ebnf(text: str) -> float:
    """Returns the cost as if all counts were within each other."""
    places, times = len(text) * _OF_EBNF, 1.0
    for match in _CLASS_OR_COUNT.finditer(text):
        if match["class"] is not None:
            places += _of_class(match["class"])
        elif match["count"] is not None:
            numbers = [int(number[:9]) for number in re.findall(r"\d+", match["count"])]
            times = min(_LARGEST, times * max([1, *numbers]))
    return places * times
