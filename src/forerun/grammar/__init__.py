"""Structured output: grammars compiled by xgrammar, and where each request is in its own."""
