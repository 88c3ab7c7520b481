"""Kernels of drafting heads: candidates of a row, scores of the next token, greedy walks."""
