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
    baselines. in_ladder: whether it is a row of the ladder, or a variant of one.
    """

    name: str
    label: str
    target: str
    options: dict[str, Any]
    chapter: int
    in_ladder: bool = True

    @property
    def is_baseline(self) -> bool:
        return self.chapter == 0

    def make(self, lm: LanguageModel, **options: Any) -> Any:
        """The engine over a model; `options` override those of the rung."""
        module, _, attribute = self.target.partition(":")
        cls: Callable[..., Any] = getattr(import_module(f"..{module}", __package__), attribute)
        return cls(lm, **{**self.options, **options})


RUNGS: list[Rung] = [
    Rung("hf", "HF generate", "bench.baselines:HFSerial", {}, chapter=0),
    Rung("hf-batch", "HF padded batch", "bench.baselines:HFStaticBatch", {}, chapter=0),
    Rung("hf-continuous", "HF continuous", "bench.hf_continuous:HFContinuousBatch", {}, chapter=0, in_ladder=False),
    Rung("naive", "naive", "naive:NaiveEngine", {}, chapter=2),
    Rung("cached-hf", "cached (HF cache)", "cached:CachedEngine", {"cache": "hf"}, chapter=3, in_ladder=False),
    Rung("cached", "cached", "cached:CachedEngine", {"cache": "own"}, chapter=3),
    Rung("slots", "slots", "engine:LLMEngine", {"kv_cache": "slots"}, chapter=4),
]


def names(*, baselines: bool = True) -> list[str]:
    """All names, in the order of the ladder."""
    return [rung.name for rung in RUNGS if baselines or not rung.is_baseline]


def newest() -> str:
    """The name of the engine that the package has got to: what the command line uses unless told otherwise."""
    return names(baselines=False)[-1]


def find(name: str) -> Rung:
    """A rung by its name or its label. Raises `InvalidParameter` with the possible names."""
    for rung in RUNGS:
        if name in (rung.name, rung.label):
            return rung
    raise InvalidParameter(f"The engine {name!r} was asked for; there are {one_of(names())}.")


def make_engine(name: str, lm: LanguageModel, **options: Any) -> Any:
    """The engine of that name over a model, e.g. `make_engine("cached", lm)`."""
    return find(name).make(lm, **options)


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
