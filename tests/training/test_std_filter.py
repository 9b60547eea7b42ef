"""RLPR's filter by the standard deviation of rewards, against numbers by hand."""

import pytest
import torch

from maxrl_fast.config.read import parse
from maxrl_fast.rollout import Sampling
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.training.collect import RolloutCollector
from maxrl_fast.training.schedule import DynamicSampling, StdFilter
from tests.tables import refused
from tests.training.test_collect import NumberedEngine, NumberedTask

NAN = float("nan")


def test_the_average_is_a_mean_and_then_moves():
    std_filter = StdFilter(0.5, torch.tensor([NAN]).double())
    means = [*[NAN] * 5, 3.0, 3.25, 3.5, 3.75, 4.0, 0.99 * 4 + 0.01 * 5.5]
    for step, mean in enumerate(means, start=1):
        assert std_filter.bound(step) == pytest.approx(0.5 * 4 / 2**0.5 if step == 11 else 0)
        # deviations: step / sqrt(2) of the first group, 0 of the second, none of the third
        std_filter.observe(torch.tensor([[step, 0.0], [2.0, 2.0], [1.0, NAN]]), step)
        assert float(std_filter.average) == pytest.approx(mean / 2**0.5, nan_ok=True)


def test_groups_below_the_bound_are_replaced():
    task = NumberedTask(5)
    task.table = [[0.0, 1.0], [0.0, 0.1], [3.0, 3.0], [0.0, 2.0]]
    std_filter = StdFilter(0.5, torch.tensor([0.7]).double())
    engine = NumberedEngine(), Scorer(task, None), Sampling(1.0, 32, task.stop_ids)
    schedule = DynamicSampling(2, 2, 3, std_filter)
    collector = RolloutCollector(task, *engine, 2, 2, schedule=schedule)
    batch = collector.collect(11, 0)
    assert batch.prompts.ids.tolist() == [0, 3]
    assert batch.metrics["frac_prompts_alive"] == 0.5
    assert float(std_filter.average) == pytest.approx(0.99 * 0.7 + 0.01 * 3.1 / 4 / 2**0.5)
    assert collector.collect(10, 0).prompts.ids.tolist() == [0, 1]
    with refused("std-filter needs --dynamic-sampling of 2 or more"):
        parse(["--std-filter", "0.5"])
