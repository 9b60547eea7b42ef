import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer


@pytest.mark.slow
def test_a_resumed_run_shows_every_step_once(shared_run):
    """Before it was killed, it had written steps after its last checkpoint."""
    events = EventMultiplexer({"killed": str(shared_run("killed") / "tensorboard")}).Reload()
    assert [event.step for event in events.Tensors("killed", "metrics/entropy")] == [*range(1, 7)]
    # an evaluation may be repeated
    assert sorted({x.step for x in events.Tensors("killed", "eval/pass_at_1")}) == [0, 2, 4, 6]
