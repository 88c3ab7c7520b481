"""Structured output: grammars compiled by xgrammar, and the state of each request in its grammar."""
