"""Python's collection of garbage, in processes that serve."""

from __future__ import annotations

import gc


def freeze_loaded() -> None:
    """Collects once, and has later collections pass over what is left: modules and the model stay.

    There are hundreds of thousands of such objects, and a whole collection that looks at all of
    them takes longer than many steps.
    """
    gc.collect()
    gc.freeze()
