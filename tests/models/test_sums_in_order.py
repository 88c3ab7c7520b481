"""Sums across ranks in a fixed order, by processes that communicate."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from forerun.layers.torch_communicator import HOST, RankPlace, TorchCommunicator, meeting_point

VALUES = (1e8, 1.0, -1e8)  # (1e8 + 1) - 1e8 is 0 in float32, and (1e8 - 1e8) + 1 is 1


def _sum(rank: int, port: int, results: Any) -> None:
    place = RankPlace(rank, len(VALUES), (HOST, port), 60, fixed_order=True)
    comm = TorchCommunicator(place, torch.device("cpu"))
    own = torch.full((2, 3), VALUES[rank])
    results.put(comm.all_reduce(own).tolist())
    comm.close()


@pytest.mark.exhaustive
def test_values_are_added_in_the_order_of_the_ranks() -> None:
    context, store = multiprocessing.get_context("fork"), meeting_point()
    results = context.Queue()
    ranks = [
        context.Process(target=_sum, args=(rank, store.port, results))
        for rank in range(len(VALUES))
    ]
    for each in ranks:
        each.start()
    got = [results.get(timeout=60) for _ in ranks]
    for each in ranks:
        each.join()
    want = torch.tensor(VALUES).unsqueeze(1)
    in_order = float((want[0] + want[1]) + want[2])
    assert got == [[[in_order] * 3] * 2] * len(VALUES)
