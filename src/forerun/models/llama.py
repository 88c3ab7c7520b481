"""Llama 2 to 3.2. Its rope scaling is read from the config; nothing else differs."""

from __future__ import annotations

from forerun.models.decoder import DecoderLM


class LlamaForCausalLM(DecoderLM):
    """Grouped queries, no biases unless the config says so."""
