"""Records to token ids with their labels: conversations in the target's chat template, or texts.

Labels are the tokens of the assistant's turns. Templates with `{% generation %}` markers say which
these are; of others, they are what the assistant's turn adds to the conversation before it, up to
the token that ends the turn. Where a template writes a turn differently once others follow (some
drop earlier reasoning), that turn becomes a document of its own, as it was when it was served.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateSyntaxError
from numpy.typing import NDArray

from forerun.core.errors import ConfigError, first_line, shown
from forerun_train.data.records import DataError, Message, Record

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # characters, from and up to


@dataclass(frozen=True)
class Document:
    """N tokens that belong together."""

    ids: NDArray[np.int32]  # [N]
    labels: NDArray[np.bool_]  # [N], whether the loss counts a token as a target

    def cut(self, length: int) -> Document:
        """At most so many tokens from the beginning."""
        return Document(self.ids[:length], self.labels[:length])


@dataclass(frozen=True)
class Rendered:
    """A document as text; `spans`: of its labels, in order. No spans: every token is one."""

    text: str
    spans: tuple[Span, ...]
    record: Record


@dataclass
class Renderer:
    """Turns records into documents with a tokenizer and a chat template."""

    tokenizer: Any
    template: str | None = None  # Jinja; None: the tokenizer's own
    vocab_size: int | None = None  # of the target; None: not checked
    marked: bool = field(init=False)  # the template says which tokens are the assistant's

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: the tokenizer cannot tell where in a text its tokens are, or the template
                is none.
        """
        if not self.tokenizer.is_fast:
            raise ConfigError(
                "training needs a tokenizer with a tokenizer.json (a fast one), which tells where"
                " its tokens are in a text."
            )
        self._ends = np.array(self.tokenizer.all_special_ids, dtype=np.int32)
        template = self.template or self.tokenizer.chat_template
        self.marked = isinstance(template, str) and GENERATION.search(template) is not None
        if self.template is not None:
            self._check_syntax(self.template)

    @classmethod
    def of(cls, tokenizer: Any, template: str | None, vocab_size: int | None = None) -> Renderer:
        """With the chat template in a file, or given as text; None: the tokenizer's own.

        Raises:
            ConfigError: there is no such file, it is no template, or the tokenizer is too slow.
        """
        if template is not None and "{" not in template:
            try:
                template = Path(template).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"template {template} cannot be read: {first_line(error)}. Give the file of a"
                    " chat template, in Jinja."
                ) from None
        return cls(tokenizer, template, vocab_size)

    def _check_syntax(self, template: str) -> None:
        message = {"role": "user", "content": ""}
        try:
            self.tokenizer.apply_chat_template([message], chat_template=template, tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: line {error.lineno}: {first_line(error)}."
            ) from None
        except Exception:  # noqa: BLE001, S110  it may well refuse such a conversation
            pass

    def documents(self, records: Sequence[Record]) -> list[list[Document] | DataError]:
        """The documents of each record, or why it has none.

        Raises:
            ConfigError: there is no chat template.
        """
        out: list[list[Document] | DataError] = []
        plain: list[tuple[int, Rendered]] = []
        for at, record in enumerate(records):
            out.append([])
            try:
                if record.text is None and self.marked:
                    out[at] = [self._marked(record)]
                else:
                    plain += [(at, each) for each in self._rendered(record)]
            except DataError as error:
                out[at] = error
        for at, document in self._encoded(plain):
            found = out[at]
            assert isinstance(found, list)
            found.append(document)
        return [self._checked(found, records[at].where) for at, found in enumerate(out)]

    def _checked(self, found: list[Document] | DataError, where: str) -> list[Document] | DataError:
        """The documents, or why they are of no use."""
        if isinstance(found, DataError):
            return found
        if not any(each.labels.any() for each in found):
            return DataError(f"{where}: no token of it is the assistant's.")
        highest = max(int(each.ids.max()) for each in found if len(each.ids))
        if self.vocab_size is not None and highest >= self.vocab_size:
            token = shown(self.tokenizer.convert_ids_to_tokens(highest))
            return DataError(
                f"{where}: token {token} has id {highest}, and the target's vocabulary ends at"
                f" {self.vocab_size - 1}: its tokenizer is that of another model."
            )
        return found

    def render(self, record: Record, count: int, answer_follows: bool) -> str:
        """The first `count` messages in the template.

        Raises:
            DataError: the template refuses them.
        """
        text: str = self._apply(
            record, record.messages[:count], tokenize=False, add_generation_prompt=answer_follows
        )
        return text

    def _apply(self, record: Record, messages: Sequence[Message], **options: Any) -> Any:
        if self.template is None and not self.tokenizer.chat_template:
            raise ConfigError(
                "the target has no chat template; give one with --template FILE, or train on lines"
                " with 'text'."
            )
        if self.template is not None:
            options["chat_template"] = self.template
        try:
            return self.tokenizer.apply_chat_template(list(messages), tools=record.tools, **options)
        except Exception as error:  # jinja2 and templates raise whatever they like
            raise DataError(
                f"{record.where}: the chat template fails: {first_line(error)}."
            ) from error

    def _marked(self, record: Record) -> Document:
        """By the template's own markers."""
        found = self._apply(
            record,
            record.messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = np.array(found["input_ids"], dtype=np.int32)
        labels = np.array(found["assistant_masks"], dtype=np.bool_)
        return Document(ids, self._open_ended(ids, labels) if record.truncated else labels)

    def _rendered(self, record: Record) -> list[Rendered]:
        """Text and label spans: a document for every run of turns whose text stays as it was."""
        if record.text is not None:
            return [Rendered(record.text, (), record)]
        out: list[Rendered] = []
        for at in reversed(range(1, len(record.messages))):
            if record.messages[at]["role"] != "assistant":
                continue
            text = self.render(record, at + 1, answer_follows=False)
            span = (self._start(record, at, text), len(text))
            if out and out[-1].text.startswith(text):
                out[-1] = replace(out[-1], spans=(span, *out[-1].spans))
            else:
                out.append(Rendered(text, (span,), record))
        return out[::-1]

    def _start(self, record: Record, at: int, text: str) -> int:
        """Where the answer `at` begins in the text that ends with it."""
        prompt = self.render(record, at, answer_follows=True)
        if text.startswith(prompt):
            return len(prompt)
        before = self.render(record, at, answer_follows=False)
        same = _common_prefix(text, prompt)
        if same < len(before):
            raise DataError(
                f"{record.where}: the chat template does not write turn {at + 1} after the turns"
                " before it, so its tokens cannot be found; give a template with {% generation %}"
                " markers (--template)."
            )
        return same

    def _encoded(self, rendered: Sequence[tuple[int, Rendered]]) -> list[tuple[int, Document]]:
        """Token ids and labels; texts get the tokenizer's special tokens, templates have them."""
        out: list[tuple[int, Document]] = []
        for is_text in (False, True):
            chosen = [(at, r) for at, r in rendered if (r.record.text is not None) == is_text]
            if not chosen:
                continue
            found = self.tokenizer(
                [r.text for _, r in chosen], add_special_tokens=is_text, verbose=False
            )
            pairs = zip(chosen, found.encodings, strict=True)
            out += [(at, self._labelled(r, encoding)) for (at, r), encoding in pairs]
        return out

    def _labelled(self, rendered: Rendered, encoding: Any) -> Document:
        ids = np.array(encoding.ids, dtype=np.int32)
        if not rendered.spans:
            return Document(ids, np.ones(len(ids), dtype=np.bool_))
        starts, ends = np.array(encoding.offsets).T
        labels = np.zeros(len(ids), dtype=np.bool_)
        for span in rendered.spans:
            first = np.searchsorted(ends, span[0], side="right")  # the token it begins in
            last = np.searchsorted(starts, span[1])
            labels[first : self._turn_end(ids, int(first), int(last))] = True
        if rendered.record.truncated:
            labels = self._open_ended(ids, labels)
        return Document(ids, labels)

    def _turn_end(self, ids: NDArray[np.int32], first: int, last: int) -> int:
        """Behind the token that ends a turn; `last` where there is none."""
        near = max(first, last - MARGIN)
        ends = np.flatnonzero(np.isin(ids[near:last], self._ends))
        return near + int(ends[-1]) + 1 if len(ends) else last

    def _open_ended(self, ids: NDArray[np.int32], labels: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Without the end of the last answer, which the target has not written."""
        places = np.flatnonzero(labels)[-MARGIN:]
        ends = places[np.isin(ids[places], self._ends)]
        if not len(ends):
            return labels
        kept = labels.copy()
        kept[ends[-1] :] = False
        return kept


def _common_prefix(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


MARGIN = 4  # tokens, the last of a turn, among which is the one that ends it
