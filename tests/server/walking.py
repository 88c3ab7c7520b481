"""A scripted engine without scripts: random walks through the grammars of its requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forerun.core.grammar import Grammar
from forerun.grammar.compiler import GrammarCompiler
from forerun.grammar.vocabulary import VocabularySource
from forerun.server.generation import Call
from forerun.server.text import TextService
from tests.server.scripted import EOS, Scripted, ScriptedEngine

CLOSING = b'"}]:,'  # preferred, so that walks end
ENDING_TOKENS, MAX_TOKENS = 100, 4000  # soon over, and far too long


class WalkingEngine(ScriptedEngine):
    """Answers with any text that a request's grammar allows and that begins with `begin`."""

    def __init__(self, text: TextService, folder: Path, seed: int, begin: str) -> None:
        super().__init__(text, (), step=3)
        text.tokenizer.save_pretrained(folder)
        vocabulary = text.tokenizer.get_vocab()
        source = VocabularySource(folder, len(vocabulary), (vocabulary[EOS],))
        self._compiler = GrammarCompiler(source)
        self._rng = random.Random(seed)
        self._begin = text.tokenizer(begin, add_special_tokens=False)["input_ids"]
        self.walked: list[str] = []

    async def compile_grammar(self, grammar: Grammar, replica: int, client: str = "") -> None:
        await super().compile_grammar(grammar, replica, client)
        self._compiler.compile(grammar)

    def submit(self, call: Call) -> None:
        for generation in call.generations:
            grammar = generation.params.grammar
            assert grammar is not None
            self.walked.append(self._walk(grammar))
            self._scripts.append(self.walked[-1])
        super().submit(call)

    def _walk(self, grammar: Grammar) -> str:
        import xgrammar

        compiled = self._compiler.compile(grammar)
        matcher, rng = xgrammar.GrammarMatcher(compiled), self._rng
        spelled = self._compiler.vocabulary().full.decoded_vocab
        bitmask = torch.empty(1, -(-len(spelled) // 32), dtype=torch.int32)
        out = list(self._begin)
        for token in out:
            assert matcher.accept_token(token), self._text.tokenizer.decode(token)
        while len(out) < MAX_TOKENS:
            matcher.fill_next_token_bitmask(bitmask)
            bits = bitmask[0].unsqueeze(1) >> torch.arange(32, dtype=torch.int32) & 1
            allowed = bits.flatten()[: len(spelled)].nonzero().flatten().tolist()
            going_on = [token for token in allowed if token != self._eos]
            soon = not going_on or len(out) > ENDING_TOKENS or rng.random() < 0.4
            if soon and len(going_on) < len(allowed):
                text: str = self._text.tokenizer.decode(out, skip_special_tokens=False)
                return text
            closing = [t for t in going_on if len(spelled[t]) > 1 or spelled[t] in CLOSING]
            token = rng.choice(closing if closing and rng.random() < 0.6 else going_on)
            assert matcher.accept_token(token)
            out.append(token)
        raise AssertionError(f"no end: {self._text.tokenizer.decode(out)!r}")


class Walking(Scripted):
    """A client of an application with a `WalkingEngine`."""

    def __init__(self, made: Any, folder: Path, seed: int, begin: str = "") -> None:
        self._walks = (folder, seed, begin)
        super().__init__(made)

    def _new_engine(self, scripts: Sequence[str], step: int) -> ScriptedEngine:
        return WalkingEngine(self._text, *self._walks)
