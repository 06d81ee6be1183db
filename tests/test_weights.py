"""Whether the weights of a model have changed since somebody looked: what is noticed, and that nothing else is."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from minfer_lib import LanguageModel
from minfer_lib.models.weights import WeightWatch


class Model(nn.Module):
    """Tensors of every kind that a model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(40, 30), nn.Linear(30, 40)])
        self.narrow = nn.Parameter(torch.randn(64, 9).bfloat16())
        self.turned = nn.Parameter(torch.randn(20, 30).t())  # not contiguous
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.undefined = nn.Parameter(torch.full((12,), torch.nan))
        self.register_buffer("codes", torch.randint(-127, 128, (50, 20), dtype=torch.int8))
        self.register_buffer("mask", torch.ones(10, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0, 5))
        self.register_buffer("empty_codes", torch.zeros(0, dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


@pytest.fixture()
def model() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model().requires_grad_(False)


def test_what_has_not_changed_has_not(model: Model):
    """Nor has what was read, copied, or run, and NaN is equal to itself."""
    watch = WeightWatch(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert [watch.changed() for _ in range(3)] == [False] * 3
    model(torch.randn(3, 40)), model.state_dict(), model.eval(), model.train()
    for tensor in model.state_dict().values():
        tensor.clone().fill_(1)
    assert not watch.changed()
    for name, tensor in model.state_dict().items():
        assert tensor.equal(before[name]) or name == "undefined"


CHANGES: dict[str, Callable[[Model], object]] = {
    "in place": lambda m: m.layers[1].weight.mul_(2),
    "a single weight in place": lambda m: m.layers[0].weight[7, 7].add_(1),
    "through .data": lambda m: m.layers[0].weight.data.mul_(1.01),
    "the second half through .data": lambda m: m.layers[0].weight.data[15:].mul_(2),
    "through .data, in bfloat16": lambda m: m.narrow.data.mul_(-1),
    "through .data, not contiguous": lambda m: m.turned.data.add_(1e-3),
    "through .data, one number": lambda m: m.scalar.data.fill_(3.0),
    "through .data, from NaN": lambda m: m.undefined.data.fill_(0.0),
    "through .data, to NaN": lambda m: m.layers[1].bias.data.fill_(torch.nan),
    "through .data, int8 codes": lambda m: m.codes.data.neg_(),
    "through .data, booleans": lambda m: m.mask.data.logical_not_(),
    "a buffer in place": lambda m: m.codes.add_(1),
    "another tensor in .data": lambda m: setattr(m.narrow, "data", m.narrow.data.clone()),
    "another parameter": lambda m: setattr(m, "scalar", nn.Parameter(m.scalar.clone())),
    "another buffer": lambda m: setattr(m, "codes", m.codes.clone()),
    "another module": lambda m: m.layers.__setitem__(0, nn.Linear(40, 30)),
    "one tensor more": lambda m: m.register_buffer("more", torch.zeros(2)),
    "one tensor less": lambda m: delattr(m, "mask"),
    "another dtype": lambda m: m.to(torch.float64),
    "a loaded state dict": lambda m: m.load_state_dict({"narrow": m.narrow + 1}, strict=False),
    "a hook": lambda m: m.layers[0].register_forward_hook(lambda *args: None),
    "a hook before": lambda m: m.layers[1].register_forward_pre_hook(lambda *args: None),
}  # fmt: skip


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_is_noticed_once(model: Model, how: str):
    watch = WeightWatch(model)
    CHANGES[how](model)
    assert watch.changed() and not watch.changed()


def test_each_of_several_changes_is_noticed(model: Model):
    """The numbers that are looked at are those of now: a tensor that moved is watched at its new place."""
    watch = WeightWatch(model)
    for factor in (2.0, 0.5):
        for tensor in (model.layers[0].weight, model.narrow, model.turned):
            tensor.data.mul_(factor)
            assert watch.changed() and not watch.changed()
            tensor.data = tensor.data.clone()
            assert watch.changed() and not watch.changed()


def test_a_hook_that_comes_and_goes(model: Model):
    watch = WeightWatch(model)
    handles = [layer.register_forward_hook(lambda *args: None) for layer in model.layers]
    assert watch.changed() and not watch.changed()
    for handle in handles:
        handle.remove()
        assert watch.changed() and not watch.changed()


def test_what_is_not_contiguous_and_has_three_dimensions(model: Model):
    """As the weights of experts, which some checkpoints keep turned."""
    model.experts = nn.Parameter(torch.randn(4, 6, 5).transpose(1, 2), requires_grad=False)
    watch = WeightWatch(model)
    model.experts.data.mul_(2)
    assert watch.changed()


def test_a_model_without_tensors():
    watch = WeightWatch(nn.Identity())
    assert not watch.changed()


def test_inference_tensors_have_no_version():
    with torch.inference_mode():
        layer = nn.Linear(5, 5)
        watch = WeightWatch(layer)
        assert not watch.changed()
        layer.weight.mul_(2)
        assert watch.changed() and not watch.changed()


def test_it_costs_a_few_numbers_a_tensor(tiny: LanguageModel):
    watch = WeightWatch(tiny.model)
    tensors = [*tiny.model.parameters(), *tiny.model.buffers()]
    assert sum(numbers.numel() for numbers in watch._numbers) <= 8 * len(tensors)
    assert not watch.changed()
