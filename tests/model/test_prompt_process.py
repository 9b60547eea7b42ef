"""The process that encodes prompts answers one request at a time."""

import contextlib
import threading

from maxrl_fast.model import prompt_process
from maxrl_fast.model.prompt_process import PromptEncoder


class OneAtATime:
    """A worker that notes whether a request came before the answers to another were read."""

    def __init__(self):
        self.waiting, self.has_overlapped, self.both = 0, False, threading.Barrier(2)

    def send(self, request):
        self.has_overlapped |= self.waiting > 0
        self.waiting += 1 + len(request["prompts"])
        with contextlib.suppress(threading.BrokenBarrierError):
            self.both.wait(0.2)  # where nothing holds it back, the other thread comes here too

    def receive(self):
        self.waiting -= 1
        return {"ids": [1]}


def test_two_threads_encode_in_turn(monkeypatch):
    worker = OneAtATime()
    monkeypatch.setattr(prompt_process.Worker, "running", lambda: worker)
    encoder = PromptEncoder.__new__(PromptEncoder)
    encoder._settings = {}
    threads = [threading.Thread(target=encoder.encode, args=(["a", "b"], ["first", "second"])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not worker.has_overlapped
    assert worker.waiting == 0
