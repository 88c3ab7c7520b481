"""Ranges of what the device tables hold, and token ids with a meaning of their own. No torch.

A request's values are checked against these before it is admitted: a value that a device table
cannot hold must never reach a step, where it would fail every request of the batch.
"""

from __future__ import annotations

INVALID_TOKEN = -1  # sampled from a row of logits that is NaN, infinite or all -inf

MAX_STOP_IDS = 16  # stop ids per slot that `min_new_tokens` can mask

# int64 in the table, but compared with the vocabulary size: more tokens than any vocabulary has.
MAX_TOP_K = 2**31 - 1
# float32 in the table. Below the smallest normal number a temperature would become 0: greedy.
MIN_TEMPERATURE, MAX_TEMPERATURE = 2.0**-126, 2.0**127
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1  # int64
MAX_POSITION = 2**31 - 1  # int32: prompt, generated tokens and drafts together
