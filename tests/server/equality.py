"""Request bodies as a product, their answers in one form, and the comparison of two answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import httpx
import pytest

from tests.covering import covering

TOKENS = 28
SECONDS = 240  # for an answer, behind all others
# Of log-probabilities. The bundled target's logits reach 25, and a run in float32 is up to 1.2e-4
# away from float64.
TOLERANCE = 2.5e-4
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["number", "text"]},
        "values": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["kind", "values"],
}
CONTENT = {"type": "regex", "pattern": "[a-z]{2,9}"}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<t>", "content": CONTENT, "end": "</t>"},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
FUNCTION = {"name": "note", "parameters": SCHEMA}
CALL = {
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_completion_tokens": 64,  # so that calls end
}

# What a value of a factor adds to the body. Where the APIs differ, `_of_api` translates.
Addition = dict[str, Any]
GRAMMARS: dict[str, Addition] = {
    "free": {},
    "schema": {"json_schema": SCHEMA},
    "regex": {"regex": r"[ -~\n]{8,40}"},
    "ebnf": {"ebnf": 'root ::= line root | line\nline ::= [^\\n]+ "\\n"'},
    "tag": {"structural_tag": TAG},
    "call": CALL,  # of chat completions only
}
# Large enough to reject repeated tokens of drafts that would be accepted otherwise.
PENALTIES: dict[str, Addition] = {
    "none": {},
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {"13": 2.5, "262": -100}},
    "all": {
        "frequency_penalty": 1.0,
        "presence_penalty": -0.6,
        "repetition_penalty": 1.5,
        "logit_bias": {"32": 1.5, "101": -3.0},
    },
}
LOGPROBS = ("none", "sampled", "top", "prompt")
SEEDS: dict[str, Addition] = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.6, "top_p": 0.9, "seed": 1},
    "warm": {"temperature": 1.0, "min_p": 0.02, "top_k": 40, "seed": 2},
}
ENDS: dict[str, Addition] = {
    "limit": {},
    "stop": {"stop": ["e", "))"]},
    "late": {"min_tokens": 12, "stop_token_ids": [15, 20]},
    "never": {"ignore_eos": True},
    "several": {"n": 2},
}
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")
# Of problems like these the bundled pair accepts long drafts.
PROBLEMS = (
    "Each hour Kim packs 14 magnets while Simon packs only 12. How many after 11 hours?",
    "Each hour Lena paints 15 tiles while Omar paints only 13. How many after 12 hours?",
)
TURNS = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in PROBLEMS]
TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    TURNS[0],
    "Once upon a time, there was a little girl. She was",
    TURNS[1],
)
FACTORS: dict[str, Iterable[str]] = {
    "path": PATHS,
    "grammar": GRAMMARS,
    "penalty": PENALTIES,
    "logprobs": LOGPROBS,
    "seed": SEEDS,
    "end": ENDS,
}


class Question(NamedTuple):
    """A request: its values of the factors, and its body without `stream`."""

    name: str
    path: str
    body: dict[str, Any]


def questions(strength: int) -> list[Question]:
    """Requests that together have all combinations of `strength` values of the factors."""
    product = itertools.product(*FACTORS.values())
    cells = [dict(zip(FACTORS, values, strict=True)) for values in product]
    cells = [cell for cell in cells if _exists(cell)]
    return [_question(cells[i], i) for i in sorted(covering(cells, strength))]


def _exists(cell: dict[str, str]) -> bool:
    chat = cell["path"] == "/v1/chat/completions"
    if cell["logprobs"] == "prompt" and chat:
        return False  # the API has none
    if cell["seed"] == "greedy" and cell["end"] == "several":
        return False  # is refused: equal texts
    return chat or cell["grammar"] != "call"


def _question(cell: dict[str, str], at: int) -> Question:
    chosen = (
        GRAMMARS[cell["grammar"]], PENALTIES[cell["penalty"]], SEEDS[cell["seed"]],
        ENDS[cell["end"]],
    )  # fmt: skip
    params = {name: value for each in chosen for name, value in each.items()}
    path = cell["path"]
    texts = PROBLEMS if path == PATHS[1] else TEXTS
    make = {PATHS[0]: _completion, PATHS[1]: _chat, PATHS[2]: _native}[path]
    body = make(texts[at % len(texts)], params, cell["logprobs"])
    return Question(" ".join(cell.values()), path, body)


def _completion(text: str, params: Addition, logprobs: str) -> dict[str, Any]:
    asked: dict[str, Addition] = {
        "none": {}, "sampled": {"logprobs": 0}, "top": {"logprobs": 3},
        "prompt": {"logprobs": 2, "echo": True},
    }  # fmt: skip
    common = {"max_tokens": TOKENS, "return_token_ids": True}
    return {"prompt": text, **common, **asked[logprobs], **params}


def _chat(text: str, params: Addition, logprobs: str) -> dict[str, Any]:
    params = dict(params)
    if "json_schema" in params:  # in OpenAI's form
        del params["json_schema"]
        params["response_format"] = FORMAT
    asked: dict[str, Addition] = {
        "none": {}, "sampled": {"logprobs": True}, "top": {"logprobs": True, "top_logprobs": 3},
    }  # fmt: skip
    common = {"max_completion_tokens": TOKENS, "return_token_ids": True}
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, **common, **asked[logprobs], **params}


def _native(text: str, params: Addition, logprobs: str) -> dict[str, Any]:
    names = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
    sampling = {names.get(name, name): value for name, value in params.items()}
    asked: dict[str, Addition] = {
        "none": {},
        "sampled": {"return_logprob": True, "token_ids_logprob": [5, 7]},
        "top": {"return_logprob": True, "top_logprobs_num": 3, "return_text_in_logprobs": True},
        "prompt": {"return_logprob": True, "logprob_start_len": 3, "top_logprobs_num": 2},
    }
    return {
        "text": text,
        "sampling_params": {"max_new_tokens": TOKENS, **sampling},
        "return_token_texts": True,
        **asked[logprobs],
    }


# --- answers -------------------------------------------------------------------------------------


def answer(http: httpx.Client, question: Question, stream: bool) -> Any:
    """What the server answers, without what differs between two runs.

    A stream is put together to what it would be without `stream`.
    """
    path, body = question.path, question.body
    if not stream:
        response = http.post(path, json=body, timeout=SECONDS)
        assert response.status_code == 200, f"{question.name}: {response.text}"
        return _repeatable(response.json())
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", path, json=body, timeout=SECONDS) as response:
        assert response.status_code == 200, f"{question.name}: {response.read().decode()}"
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert not [each for each in events if "error" in each], f"{question.name}: {events[-1]}"
    return _repeatable((_joined_native if path == "/generate" else _joined)(events))


def _joined_native(events: list[dict[str, Any]]) -> Any:
    """Every event of a generation has all there is so far: the last ones count."""
    last = {each.pop("index", None): each for each in events}
    return last[None] if None in last else [last[index] for index in sorted(last)]


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """An answer of the OpenAI API from its chunks."""
    *parts, end = chunks
    assert end["choices"] == [] and all(part["usage"] is None for part in parts)
    choices: dict[int, dict[str, Any]] = {}
    out: dict[str, Any] = {"model": end["model"], "object": end["object"].removesuffix(".chunk")}
    for part in parts:
        if "prompt_token_ids" in part:  # of chat: beside the choices
            out["prompt_token_ids"] = part["prompt_token_ids"]
        (choice,) = part["choices"]
        into = choices.setdefault(choice["index"], {})
        assert into.get("finish_reason") is None
        _add(into, choice)
    for choice in choices.values():
        _whole_choice(choice)
    return {**out, "choices": [choices[at] for at in sorted(choices)], "usage": end["usage"]}


def _add(into: dict[str, Any], part: dict[str, Any]) -> None:
    """Texts and lists grow; tool calls by their index; everything else is replaced."""
    for name, value in part.items():
        old = into.get(name)
        if name == "tool_calls":
            for call in value:
                calls = into.setdefault(name, [])
                if call["index"] == len(calls):
                    calls.append({})
                _add(calls[call["index"]], call)
        elif isinstance(value, dict) and name in ("delta", "logprobs", "function"):
            into[name] = old or {}
            _add(into[name], value)
        elif name in ("text", "content", "arguments") and isinstance(value, str):
            into[name] = (old or "") + value
        elif isinstance(value, list) and name != "prompt_token_ids":
            into[name] = (old or []) + value
        elif value is not None or name not in into:
            into[name] = value


def _whole_choice(choice: dict[str, Any]) -> None:
    """A delta becomes a message."""
    if "delta" in choice:
        choice["message"] = message = choice.pop("delta")
        for call in message.get("tool_calls", ()):
            del call["index"]
        choice.setdefault("token_ids", [])


def _repeatable(given: Any) -> Any:
    """Without ids, times, and figures of the prefix cache and of speculation."""
    if isinstance(given, list):
        return [_repeatable(each) for each in given]
    out = {name: value for name, value in given.items() if name not in ("id", "created")}
    if "usage" in out:
        out["usage"] = {k: v for k, v in out["usage"].items() if k != "prompt_tokens_details"}
    if "meta_info" in out:
        out["meta_info"] = _repeatable_info(out["meta_info"])
    for choice in out.get("choices", ()):
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            found = entry["top_logprobs"]
            entry["top_logprobs"] = {str(each["bytes"]): each["logprob"] for each in found}
        message = choice.get("message", {})
        if not message.get("content"):
            message.pop("content", None)  # null or empty
        if choice["finish_reason"] == "stop":
            message.pop("tool_calls", None)  # malformed; streams have begun to show it
        for call in message.get("tool_calls", ()):
            del call["id"]
    return out


def _repeatable_info(info: dict[str, Any]) -> dict[str, Any]:
    volatile = ("id", "e2e_latency", "cached_tokens")
    out = {k: v for k, v in info.items() if k not in volatile and not k.startswith("spec_")}
    for name in ("input_top_logprobs", "output_top_logprobs"):
        if name in out:
            out[name] = [
                top and {f"{token} {text}": value for value, token, text in top}
                for top in out[name]
            ]
    return out


# --- comparison ----------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """An answer taken apart; all floats are log-probabilities."""

    rest: Any  # with 0.0 for floats and None for the most probable tokens
    values: list[float]
    tops: list[dict[str, float] | None]  # of one token each

    @classmethod
    def of(cls, whole: Any) -> _Parts:
        values: list[float] = []
        tops: list[dict[str, float] | None] = []

        def walk(part: Any) -> Any:
            if isinstance(part, float):
                values.append(part)
                return 0.0
            if isinstance(part, list):
                return list(map(walk, part))
            return {k: member(k, part[k]) for k in sorted(part)} if isinstance(part, dict) else part

        def member(name: str, value: Any) -> Any:
            if not name.endswith("top_logprobs"):
                return walk(value)
            tops.extend(value if isinstance(value, list) else [value])
            return None

        return cls(walk(whole), values, tops)


def compare(got: Any, want: Any, name: str) -> None:
    """Log-probabilities to `TOLERANCE`, everything else exactly.

    Of the most probable tokens those may differ that are tied with the last one.
    """
    mine, other = _Parts.of(got), _Parts.of(want)
    assert mine.rest == other.rest, name
    assert mine.values == pytest.approx(other.values, abs=TOLERANCE, rel=0), name
    for ours, theirs in zip(mine.tops, other.tops, strict=True):
        assert (ours is None) == (theirs is None), name
        assert _ranked(ours, theirs) == pytest.approx(_ranked(theirs, ours), abs=TOLERANCE, rel=0)


def _ranked(top: dict[str, float] | None, other: dict[str, float] | None) -> list[float]:
    """Values of the tokens that both have, in the order of their names, then of the others."""
    if top is None or other is None:
        return []
    both = [top[token] for token in sorted(top.keys() & other.keys())]
    return both + sorted(top[token] for token in top.keys() - other.keys())
