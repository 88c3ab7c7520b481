"""A compiler for the bundled pair's tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from forerun.grammar.compiler import CompileOptions, GrammarCompiler
from forerun.grammar.vocabulary import VocabularySource
from forerun.llm.bundled import bundled

EOS = (2, 0)
VOCAB_SIZE = 6144


def new_compiler(folder: Path | None = None, **options: Any) -> GrammarCompiler:
    source = VocabularySource(folder or bundled("target"), VOCAB_SIZE, EOS)
    return GrammarCompiler(source, CompileOptions(**options))


@cache
def compiler() -> GrammarCompiler:
    return new_compiler()


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(bundled("target")))
