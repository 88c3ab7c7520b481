"""Ragged verification: how the verified tokens of a step are divided among its requests.

`allocate.py` divides them by survival probabilities, `estimator.py` estimates those. How many there
are is decided on the host (`scheduler/verify_budget.py`).
"""
