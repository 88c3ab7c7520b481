"""Parsers of generated text: reasoning, tool calls and what is left. No I/O."""
