"""A load generator for OpenAI-compatible and SGLang-native servers. Imports no torch."""
