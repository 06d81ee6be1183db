"""The rungs of the ladder: every engine by name, in the order of the chapters, and the run that measures them all.

Invariant: a name stands for one engine with one set of options, and the ladder is measured as a whole each time: no row
is carried over from an earlier run. A chapter adds its engine with one line in `RUNGS`; nothing else has to know of it.

Names can be listed without torch, so that the command line is quick to explain itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import InvalidParameter, UnsupportedModel, one_of

if TYPE_CHECKING:
    from ..loading import LanguageModel
    from .results import Comparison
    from .workloads import Workload


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    name: for the command line. label: its row's name in tables. target: "module:Class" inside this package, imported
    only when the engine is made. options: keyword arguments of the class. chapter: that introduces it; 0 for the
    baselines. in_ladder: whether it is a row of the ladder, or a variant of one. weights: "module:function" that makes
    the model it runs, with other weights, from the one that is given; empty: it runs that one.
    """

    name: str
    label: str
    target: str
    options: dict[str, Any]
    chapter: int
    in_ladder: bool = True
    weights: str = ""

    @property
    def is_baseline(self) -> bool:
        return self.chapter == 0

    def make(self, lm: LanguageModel, *, in_place: bool = False, **options: Any) -> Any:
        """The engine over a model; `options` override those of the rung.

        A rung with other weights makes a copy of the model to change, unless with `in_place` it may change the model.
        """
        if not self.weights:
            return _named(self.target)(lm, **{**self.options, **options})
        engine = _named(self.target)(_named(self.weights)(lm, in_place=in_place), **{**self.options, **options})
        engine.name = self.label  # the class is that of another rung
        return engine


def _named(target: str) -> Callable[..., Any]:
    """What "module:name" stands for inside this package."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(f"..{module}", __package__), attribute)


SLOTS = {"kv_cache": "slots"}


RUNGS: list[Rung] = [
    Rung("hf", "HF generate", "bench.baselines:HFSerial", {}, chapter=0),
    Rung("hf-batch", "HF padded batch", "bench.baselines:HFStaticBatch", {}, chapter=0),
    Rung("hf-continuous", "HF continuous", "bench.hf_continuous:HFContinuousBatch", {}, chapter=0, in_ladder=False),
    Rung("naive", "naive", "naive:NaiveEngine", {}, chapter=2),
    Rung("cached-hf", "cached (HF cache)", "cached:CachedEngine", {"cache": "hf"}, chapter=3, in_ladder=False),
    Rung("cached", "cached", "cached:CachedEngine", {"cache": "own"}, chapter=3),
    Rung("slots", "slots", "engine:LLMEngine", SLOTS, chapter=4),
    Rung("int8", "int8", "engine:LLMEngine", SLOTS, chapter=5, weights="bench.cheaper:int8"),
    Rung("bnb-int8", "bitsandbytes int8", "engine:LLMEngine", SLOTS, chapter=0, in_ladder=False,
         weights="bench.cheaper:bitsandbytes"),
]  # fmt: skip


def names(*, baselines: bool = True) -> list[str]:
    """All names, in the order of the ladder."""
    return [rung.name for rung in RUNGS if baselines or not rung.is_baseline]


def newest() -> str:
    """The engine that the package has got to, over the model as it is: what the command line uses by default.

    Answers are the model's own there; those of other weights have to be asked for.
    """
    return [rung.name for rung in RUNGS if not rung.is_baseline and not rung.weights][-1]


def find(name: str) -> Rung:
    """A rung by its name or its label. Raises `InvalidParameter` with the possible names."""
    for rung in RUNGS:
        if name in (rung.name, rung.label):
            return rung
    raise InvalidParameter(f"The engine {name!r} was asked for; there are {one_of(names())}.")


def make_engine(name: str, lm: LanguageModel, *, in_place: bool = False, **options: Any) -> Any:
    """The engine of that name over a model, e.g. `make_engine("cached", lm)`.

    "int8" runs on a copy of the model (`engine.lm`), unless with `in_place` the model itself may be quantised.
    """
    return find(name).make(lm, in_place=in_place, **options)


def ladder(
    lm: LanguageModel | None = None,
    engines: Sequence[str] | None = None,
    workload: Workload | None = None,
    *,
    repeats: int = 3,
    memory: bool = False,
    show: bool = True,
) -> Comparison:
    """Measure the baselines and every engine of the package so far on one workload, and draw the table.

    lm: None loads the default model. engines: names or labels of the registry; None takes all rows of the ladder.
    workload: None is 4 prompts of 64 tokens with 64 new tokens each. The rest is as in `compare`.

    An engine that refuses this model is left out, with a note that says why. Raises what `compare` and `load_model` do.
    """
    from ..loading import load_model
    from ..prompts import DEFAULT_MAX_MODEL_LEN
    from .comparison import compare
    from .workloads import fixed_lengths

    rungs = [find(name) for name in engines] if engines else [rung for rung in RUNGS if rung.in_ladder]
    lm = lm or load_model()
    workload = workload or fixed_lengths(lm)
    longest = max(p + params.max_tokens for p, params in zip(workload.prompt_lens, workload.params, strict=True))
    options = {"max_model_len": longest} if longest > DEFAULT_MAX_MODEL_LEN else {}
    made, refused = [], []
    for rung in rungs:
        try:
            made.append((rung.label, rung.make(lm, **options)))
        except UnsupportedModel as error:
            refused.append(f"{rung.label} left out: {error}")
    if not made:
        raise UnsupportedModel(" ".join(refused))
    return compare(*made, workload=workload, repeats=repeats, memory=memory, notes=refused, show=show)
