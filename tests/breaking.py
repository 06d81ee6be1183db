"""A model that fails in the middle of an engine's work, for tests of what is left behind."""

import itertools

import torch

from minfer_lib import LLMEngine


def break_forward(engine: LLMEngine, at: int, error: BaseException, after_it: bool = False) -> None:
    """The model raises in the engine's `at`-th step from now, before or after the keys were written."""
    forward, count = engine.runner.forward, itertools.count(1)

    def broken(inputs: object) -> torch.Tensor:
        now = next(count) == at
        if now and not after_it:
            raise error
        logits = forward(inputs)
        if now:
            raise error
        return logits

    engine.runner.forward = broken
