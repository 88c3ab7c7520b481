"""Reads the JSON of `forerun demo --json`: the texts are identical, drafts are accepted, and pay.

How much they pay depends on the machine (`docs/performance.md`), as does how many steps draft.
"""

import json
import statistics
import sys

LEAST_ACCEPTED = 4  # tokens per step of a word problem; 12 if none is a plain one

report = json.load(sys.stdin)
identical, speedup = report["identical"], report["speedup"]
problems = [each for each in report["prompts"] if each["skill"] == "word-problems"]
accepted = statistics.median(each["accept_length"] for each in problems)
print(f"demo: identical {identical}, accept length {accepted:.1f}, speed-up {speedup:.2f}")
if identical is not True or accepted < LEAST_ACCEPTED or speedup <= 1:
    sys.exit(
        "forerun demo: expected identical texts, an accept length of word problems of at least"
        f" {LEAST_ACCEPTED}, and a speed-up"
    )
