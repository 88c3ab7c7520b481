"""Token ids with a meaning of their own. No torch."""

from __future__ import annotations

# Sampled from a row of logits that has a NaN or +inf, or is -inf alone. The host sees it in a
# step's result and ends the request; on the device it is stored as 0 wherever it is read as an id.
INVALID_TOKEN = -1
