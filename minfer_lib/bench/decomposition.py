"""Why does a decode step take as long as it does? Its milliseconds in four parts that add up to it.

    reading       the bytes that it must read (each weight once, the keys and values of every request) at the bandwidth
                  that this machine has reached
    arithmetic    its operations at the speed of a large matrix product here, as far as they do not fit behind reading
    slow kernels  the rest of the time in kernels: what they take longer than these two limits
    launching     the rest of the step, in which no kernel ran: Python, and starting one operation after the other

Invariant: the step is timed without the profiler, which slows it, and the profiler is asked only for the time inside of
kernels. What one limit explains is not explained again by another, and no part is negative.

A kernel is, on a GPU, whatever the device ran, at any moment at least one of them; on a CPU the inside of an operator
of torch, without what starting it costs, or a kernel in C of this package. What starting costs is measured with the
steps of a model so small that its operators have nothing else to do.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ..engine.serial import CachedEngine
from ..errors import InvalidParameter, integer, must_be
from ..generation.params import SamplingParams
from ..kernels import compiled_attention, compiled_products
from ..learn.quiet import quiet_stderr
from ..models.load import LanguageModel, load_model
from ..quant.linear import Int8Linear
from .machine import measure_bandwidth, measure_flops, peak_flops, provenance_of, read_bandwidth, synchronize
from .results import Cells
from .roofline import decode_step_bytes, decode_step_flops
from .usage import begin, computed_tokens
from .watch import Watch
from .workloads import prompts_of

WARM_UP, PROFILED = 3, 5  # steps before any is timed, and under the profiler
PARTS = ("reading", "arithmetic", "slow kernels", "launching")
Profile = Counter[tuple[str, str]]  # by ("us" or "calls", name)
C_KERNELS = {compiled_products: "products (C)", compiled_attention: "paged_decode (C)"}


@dataclass(frozen=True)
class Operator:
    """A kernel, or an operator of torch: its name, milliseconds and calls in a step."""

    name: str
    ms: float
    calls: float


@dataclass(frozen=True)
class Decomposition:
    """A decode step of `requests` requests that look back at `context` tokens each. Times in milliseconds.

    wall_ms: of each step that was timed. kernel_ms: in kernels, by the profiler. bytes_ms, flops_ms: what its bytes and
    its operations would take at the machine's limits, which is more than it took where weights stay in a CPU's cache.
    launches: kernels and copies that a GPU ran, or operators and C kernels that Python called on a CPU. top: the
    slowest. disturbed: what other programs did meanwhile, if it matters.
    """

    engine: str
    requests: int
    context: int
    wall_ms: tuple[float, ...]
    kernel_ms: float
    bytes_ms: float
    flops_ms: float
    launches: int
    top: tuple[Operator, ...] = ()
    disturbed: str = ""
    provenance: dict[str, object] = field(default_factory=dict, repr=False)

    @property
    def step_ms(self) -> float:
        """The median of the steps."""
        return statistics.median(self.wall_ms)

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds by the names of `PARTS`; they add up to `step_ms`."""
        busy = min(self.kernel_ms, self.step_ms)
        reading = min(self.bytes_ms, busy)
        arithmetic = min(max(0.0, self.flops_ms - self.bytes_ms), busy - reading)
        spent = (reading, arithmetic, busy - reading - arithmetic, self.step_ms - busy)
        return dict(zip(PARTS, spent, strict=True))

    @property
    def values(self) -> dict[str, float]:
        """The parts and the spread of the steps, by the columns of a table; what `plots.decomposition` draws."""
        step = {"step ms": self.step_ms, "low": min(self.wall_ms), "high": max(self.wall_ms)}
        return {f"{name} ms": ms for name, ms in self.parts.items()} | step | {"launches": float(self.launches)}

    def cells(self) -> list[Cells]:
        """Lines for a `Result` of kind "table": the parts, and the slowest operators in a table of their own."""
        table = f"Slowest in {self.engine}"
        slowest = [Cells(table, each.name, {"ms": each.ms, "calls": each.calls}) for each in self.top]
        return [Cells("A decode step", self.engine, self.values), *slowest]


def decompose(
    engine: Any, requests: int = 1, context: int = 128, steps: int = 10, *, name: str | None = None
) -> Decomposition:
    """Time decode steps of an engine and say what they spend their time on; on a CPU or a GPU.

    engine: any with `stream`, and with `step` if it runs several requests at once (`LLMEngine`); or a `LanguageModel`,
    which runs with the cache of transformers. requests: that decode at once. context: tokens that each looks back at
    when it is timed, give or take the steps. steps: to be timed. name: of the row; None is the engine's, and the
    requests.

    Raises `InvalidParameter` for counts under 1, a context beyond the engine's limit, or an engine that does not decode
    so many requests in one step.
    """
    requests = integer("requests", requests, at_least=1)
    steps = integer("steps", steps, at_least=1)
    ahead = WARM_UP + (steps + 1) // 2  # so that half of the timed steps have a shorter context, half a longer one
    context = integer("context", context, at_least=ahead + 1)
    engine = CachedEngine(engine, cache="hf") if isinstance(engine, LanguageModel) else engine
    if not hasattr(engine, "stream"):
        raise must_be("engine", "an engine with stream(), or a LanguageModel", engine)
    lm = engine.lm
    if lm.device.type not in ("cpu", "cuda"):
        raise InvalidParameter(f"Kernels are timed on CPUs and on CUDA; this model is on {lm.device.type!r}.")
    # while the prompts of later requests are computed, earlier ones decode already
    before = requests * -(-context // getattr(engine, "max_num_batched_tokens", context))
    params = SamplingParams(max_tokens=before + 1 + WARM_UP + steps + PROFILED + 1, ignore_eos=True)
    room = min(lm.max_model_len, getattr(engine, "max_model_len", None) or lm.max_model_len)
    if context - ahead + params.max_tokens > room:
        raise InvalidParameter(
            f"A context of {context} tokens leaves no room for {params.max_tokens} steps: {engine.name} takes {room} "
            "tokens. Ask for a shorter one, or make the engine with a larger max_model_len."
        )
    begin(engine)
    watch = Watch()
    with contextlib.ExitStack() as stack:
        streams = []
        for prompt in prompts_of(lm, [context - ahead] * requests):
            streams.append(engine.stream(prompt, params))
            stack.callback(streams[-1].close)
        step = _step_of(engine, streams)
        rows = _rows_of_a_step(engine, step, requests)
        computed = computed_tokens(engine)
        for _ in range(WARM_UP - 1):
            step()
        wall = tuple(_timed_ms(step, lm.device) for _ in range(steps))
        profiles = [_profiled(step, lm.device) for _ in range(PROFILED)]
        if computed is not None:
            all_steps = WARM_UP - 1 + steps + PROFILED
            _check_rows(engine, (computed_tokens(engine) - computed) / all_steps, requests)
    seen = watch.seen()
    measure_bandwidth(lm.device)  # the best so far counts, and what was measured earlier may have been disturbed
    measure_flops(lm.device, lm.dtype)
    starting = _starting_us(lm.dtype, torch.get_num_threads()) if lm.device.type == "cpu" else {}
    found = [_kernels(events, lm.device.type, starting) for events in profiles]
    # an engine that computes more than one token a request has no keys and values to read
    cached = context if rows <= requests else 0
    flops = decode_step_flops(lm, requests, context, rows / requests)
    token_bytes = getattr(getattr(engine, "cache", None), "bytes_per_token", None)
    bytes_read = decode_step_bytes(lm, requests, cached, token_bytes)
    return Decomposition(
        name or f"{engine.name}, {requests} request{'s' * (requests > 1)}", requests, context, wall,
        kernel_ms=statistics.median(busy for busy, _, _ in found),
        bytes_ms=1e3 * bytes_read / read_bandwidth(lm.device),
        flops_ms=1e3 * flops / _peak(lm),
        launches=round(statistics.median(launches for _, launches, _ in found)),
        top=_slowest([operators for _, _, operators in found]),
        disturbed=str(seen) if seen.matters else "",
        provenance=provenance_of(lm),
    )  # fmt: skip


# -- steps ------------------------------------------------------------------------------------------------------------


def _step_of(engine: Any, streams: Sequence[Iterator[Any]]) -> Callable[[], object]:
    """What makes one decode step of all streams, whose prompts are computed here."""
    if len(streams) > 1 and not hasattr(engine, "step"):
        raise InvalidParameter(
            f"{len(streams)} requests at once were asked for; {engine.name} runs one after the other. Take requests=1."
        )
    for stream in streams:
        next(stream)
    return engine.step if hasattr(engine, "step") else partial(next, streams[0])


def _rows_of_a_step(engine: Any, step: Callable[[], object], requests: int) -> int:
    """Token rows that a step puts through the model: as the engine counts them, else as its embedding sees them."""
    before, seen = computed_tokens(engine), []
    embedding = engine.lm.model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0].numel()))
    try:
        step()
    finally:
        hook.remove()
    rows = sum(seen) if before is None else computed_tokens(engine) - before
    if before is not None:
        _check_rows(engine, rows, requests)
    return rows or requests


def _check_rows(engine: Any, rows: float, requests: int) -> None:
    if rows != requests:
        raise InvalidParameter(
            f"{requests} requests were to decode at once; {engine.name} computed {rows:g} tokens in a step. Make it "
            "for more requests (max_num_seqs, max_num_batched_tokens, num_blocks), or ask for fewer."
        )


def _timed_ms(step: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - began)


# -- kernels ----------------------------------------------------------------------------------------------------------


def _profiled(step: Callable[[], object], device: torch.device) -> list[Any]:
    """The profiler's events of one step."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with quiet_stderr(), _c_kernels_named():
        synchronize(device)
        with profile(activities=kinds) as profiler:
            step()
            synchronize(device)
        return list(profiler.events())


@contextlib.contextmanager
def _c_kernels_named() -> Iterator[None]:
    """Gives the kernels in C, of which torch knows nothing, their names in a profile."""

    def named(name: str, find: Callable[[], Callable[..., int]]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            function = find()
            with record_function(name):
                return function(*args)

        return call

    kept = {module: module.c_function for module in C_KERNELS}
    try:
        for module, name in C_KERNELS.items():
            module.c_function = partial(named, name, kept[module])
        yield
    finally:
        for module, find in kept.items():
            module.c_function = find


def _kernels(events: Iterable[Any], device: str, starting: Mapping[str, float]) -> tuple[float, int, Profile]:
    """Of one step: milliseconds in kernels, launches, and what each kernel or operator took.

    starting: microseconds that an operator of this name costs before it computes anything; "" is for all others.
    """
    operators: Profile = Counter()
    if device == "cpu":
        events = [event for event in events if event.device_type == DeviceType.CPU]
        for event in events:
            operators["us", event.name] += event.self_cpu_time_total
            operators["calls", event.name] += 1
        for kind, name in list(operators):
            if kind == "us":
                wasted = operators["calls", name] * starting.get(name, starting.get("", 0.0))
                operators[kind, name] = max(0.0, operators[kind, name] - wasted)
        busy_us = sum(us for (kind, _), us in operators.items() if kind == "us")
        return busy_us / 1e3, sum(event.cpu_parent is None for event in events), operators
    events = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    busy_us, reach = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.time_range.start):
        start, end = event.time_range.start, event.time_range.end
        name = event.name.removeprefix("void ").split("<")[0]  # without the arguments of C++ templates
        operators["us", name] += end - start
        operators["calls", name] += 1
        busy_us += max(0.0, end - max(start, reach))  # two at once count once
        reach = max(reach, end)
    return busy_us / 1e3, len(events), operators


def _slowest(profiles: Sequence[Profile], most: int = 5) -> tuple[Operator, ...]:
    """The operators that took most time, as means over the profiled steps."""
    total = sum(profiles, Counter())
    every = [Operator(name, us / 1e3 / len(profiles), total["calls", name] / len(profiles))
             for (kind, name), us in total.items() if kind == "us"]  # fmt: skip
    return tuple(sorted(every, key=lambda each: -each.ms)[:most])


@cache
def _starting_us(dtype: torch.dtype, threads: int) -> dict[str, float]:
    """Microseconds inside of each operator in a step of a tiny model, where all of it goes into starting.

    The median of several steps; "" is that of all operators. threads: that torch has now.
    """
    engine = CachedEngine(load_model("tiny-random", device="cpu", dtype=dtype), cache="hf")
    params = SamplingParams(max_tokens=1 + WARM_UP + PROFILED + 1, ignore_eos=True)
    with contextlib.closing(engine.stream([1] * 8, params)) as stream:
        for _ in range(1 + WARM_UP):
            next(stream)
        steps = [_kernels(_profiled(partial(next, stream), engine.lm.device), "cpu", {})[2] for _ in range(PROFILED)]
    names = [name for kind, name in steps[0] if kind == "us"]
    found = {
        name: statistics.median(step["us", name] / max(1, step["calls", name]) for step in steps) for name in names
    }
    return found | {"": statistics.median(found.values())}


def _peak(lm: LanguageModel) -> float:
    """Operations a second of a large matrix product in the model's dtype, or of its own int8 layers if that is more."""
    best = peak_flops(lm.device, lm.dtype)
    layers = [module for module in lm.model.modules() if isinstance(module, Int8Linear)]
    if layers:
        layer = max(layers, key=lambda layer: layer.weight.numel())
        x = torch.randn(512, layer.weight.shape[1], device=lm.device, dtype=lm.dtype)  # [tokens, in]
        with torch.no_grad():
            ms = [_timed_ms(lambda: layer(x), lm.device) for _ in range(4)]
        best = max(best, 2 * len(x) * layer.weight.numel() / (min(ms) / 1e3))
    return best
