"""Special token ids. No torch."""

from __future__ import annotations

# Sampled where logits hold a NaN or +inf, or only -inf. The host finds it in the step's result and
# ends the request; on the device, token 0 is stored instead wherever an id is read.
INVALID_TOKEN = -1
