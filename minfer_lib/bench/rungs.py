"""The rungs of the ladder: every engine by name, in the order of the chapters, and the run that measures them all.

Invariant: a name stands for one engine with one set of options, and the ladder is measured as a whole each time: no row
is carried over from an earlier run. A chapter adds its engine with one line in `RUNGS`; nothing else has to know of it.

Names can be listed without torch, so that the command line is quick to explain itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import BadEnvironment, InvalidParameter, UnsupportedModel, integer, must_be, one_of

if TYPE_CHECKING:
    from ..models.load import LanguageModel
    from .results import Result
    from .workloads import Workload


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    name: for the command line. label: its row's name in tables. target: "module:Class" inside this package, imported
    only when the engine is made. options: keyword arguments of the class. chapter: that introduces it; 0 for the
    baselines. in_ladder: whether it is a row of the ladder, or a variant of one. weights: "module:function" that makes
    the model it runs, with other weights, from the one that is given; empty: it runs that one. limit: the option that
    says how many requests may run at once; empty for an engine that runs one after the other. device: the only type of
    device on which it is a row of the ladder; empty: on all.
    """

    name: str
    label: str
    target: str
    options: dict[str, Any]
    chapter: int
    in_ladder: bool = True
    weights: str = ""
    limit: str = ""
    device: str = ""

    def make(self, lm: LanguageModel, **options: Any) -> Any:
        """The engine over a model, or over a copy with other weights; `options` override those of the rung."""
        lm = _named(self.weights)(lm) if self.weights else lm
        engine = _named(self.target)(lm, **{**self.options, **options})
        engine.name = self.label  # the class may be that of another rung
        return engine


def _named(target: str) -> Callable[..., Any]:
    """What "module:name" stands for inside this package."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(f"..{module}", __package__), attribute)


INT8, WEIGHT_ONLY = "bench.cheaper:int8", "bench.cheaper:int8_weight_only"
LLM_ENGINE = "engine.llm_engine:LLMEngine"
FAST = {"kv_cache": "paged", "fast": True}


def _llm_engine(
    name: str, label: str, chapter: int, kv_cache: str, *, in_ladder: bool = True, weights: str = ""
) -> Rung:
    # as the chapters build it; kernels and the fast path are later chapters'
    options = {"kv_cache": kv_cache, "backend": "torch", "fast": False}
    return Rung(name, label, LLM_ENGINE, options, chapter, in_ladder, weights, "max_num_seqs")


RUNGS: list[Rung] = [
    Rung("hf", "HF generate", "bench.baselines:HFSerial", {}, chapter=0),
    Rung("hf-batch", "HF padded batch", "bench.baselines:HFStaticBatch", {}, chapter=0, limit="batch_size"),
    Rung(
        "hf-sorted",
        "HF padded batch, sorted",
        "bench.baselines:HFStaticBatch",
        {"order": "prompt", "even": True},
        chapter=0,
        in_ladder=False,
        limit="batch_size",
    ),
    Rung(
        "hf-static",
        "HF padded batch, static cache",
        "bench.baselines:HFStaticBatch",
        {"static_cache": True},
        chapter=0,
        limit="batch_size",
        device="cuda",
    ),
    Rung("hf-continuous", "HF continuous", "bench.hf_continuous:HFContinuousBatch", {}, chapter=0, limit="max_running"),
    Rung("naive", "naive", "engine.serial:NaiveEngine", {}, chapter=2),
    Rung("cached-hf", "cached (HF cache)", "engine.serial:CachedEngine", {"cache": "hf"}, chapter=3, in_ladder=False),
    Rung("cached", "cached", "engine.serial:CachedEngine", {"cache": "own"}, chapter=3),
    _llm_engine("slots", "slots", 4, "slots"),
    _llm_engine("int8", "int8", 5, "slots", weights=INT8),
    _llm_engine("bnb-int8", "bitsandbytes int8", 0, "slots", in_ladder=False, weights="bench.cheaper:bitsandbytes"),
    _llm_engine("paged", "paged", 6, "paged"),
    _llm_engine("paged-int8", "paged + int8", 6, "paged", weights=INT8),
    Rung("fast", "fast", LLM_ENGINE, FAST, chapter=8, limit="max_num_seqs", device="cuda"),
    Rung(
        "fast-int8",
        "fast + int8",
        LLM_ENGINE,
        FAST,
        chapter=8,
        weights=WEIGHT_ONLY,
        limit="max_num_seqs",
        device="cuda",
    ),
]


def names() -> list[str]:
    """All names, in the order of the ladder."""
    return [rung.name for rung in RUNGS]


def find(name: str) -> Rung:
    """A rung by its name or its label. Raises `InvalidParameter` with the possible names."""
    for rung in RUNGS:
        if name in (rung.name, rung.label):
            return rung
    raise InvalidParameter(f"The engine {name!r} was asked for; there are {one_of(names())}.")


def make_engine(name: str, lm: LanguageModel, **options: Any) -> Any:
    """The engine of that name over a model, e.g. `make_engine("cached", lm)`; "int8" has a copy of it (`engine.lm`)."""
    return find(name).make(lm, **options)


def ladder(
    lm: LanguageModel | None = None,
    engines: Sequence[str | Any | tuple[str, Any]] | None = None,
    workload: Workload | None = None,
    *,
    max_running: int | None = None,
    max_model_len: int | None = None,
    repeats: int | None = None,
    seconds: float | None = None,
    once: Collection[str] = ("naive",),
    memory: bool | Collection[str] = False,
    progress: bool = True,
    show: bool = True,
) -> Result:
    """Measure the baselines and every engine of the package so far on one workload, and draw the table.

    lm: None loads the default model. engines: names or labels of the registry, engines, or pairs of a label and an
    engine, your own for instance; None takes all rows of the ladder. workload: None is the course workload, with four
    requests at once. max_running: requests that the engines of the registry run at once which can run several; None,
    with a workload of your own, takes their defaults. max_model_len: the limit that all are made with, and that slots
    are as long as; None takes what the longest request of the course workload needs, else their default, or what the
    longest needs. once: the naive row runs once, since it alone takes as long as all others. The rest is as in
    `compare`.

    An engine that refuses this model, or that the installed libraries cannot run, is left out, with a note that says
    why. Engines over the same other weights share one copy of the model. Raises what `compare` and `load_model` do.
    """
    from ..generation.prompts import DEFAULT_MAX_MODEL_LEN
    from ..models.load import load_model
    from .comparison import checked_repeats, compare
    from .workloads import RUNNING, course

    checked_repeats(repeats)  # before engines are made in vain
    wanted = [find(each) if isinstance(each, str) else each for each in engines or ()]
    labels_there = {rung.label for rung in RUNGS} | {each[0] for each in wanted if isinstance(each, tuple)}
    labels_there |= {getattr(each, "name", "") for each in wanted}
    if isinstance(once, str) or not set(once) <= labels_there:
        raise must_be("once", f"names of rows, of {one_of(sorted(labels_there - {''}))}", once)
    if max_running is not None:
        max_running = integer("max_running", max_running, at_least=1)
    if max_model_len is not None:
        max_model_len = integer("max_model_len", max_model_len, at_least=1)
    lm = lm or load_model()
    wanted = wanted or [rung for rung in RUNGS if rung.in_ladder and rung.device in ("", lm.device.type)]
    is_course = workload is None
    workload = workload or course(lm)
    longest = max(p + params.max_tokens for p, params in zip(workload.prompt_lens, workload.params, strict=True))
    length = max_model_len or (longest if is_course or longest > DEFAULT_MAX_MODEL_LEN else None)
    at_once = max_running or (RUNNING if is_course else None)
    models: dict[str, LanguageModel] = {}  # by what made their weights
    made, refused = [], []
    for rung in wanted:
        if not isinstance(rung, Rung):
            made.append(rung)
            continue
        options = {"max_model_len": length} | ({rung.limit: at_once} if rung.limit and at_once else {})
        try:
            engine = rung.make(models.get(rung.weights, lm), **options)
        except (UnsupportedModel, BadEnvironment) as error:
            refused.append(f"{rung.label} left out: {error}")
            continue
        made.append((rung.label, engine))
        models.setdefault(rung.weights, engine.lm)
    if not made:
        raise UnsupportedModel(" ".join(refused))
    labels = {each[0] if isinstance(each, tuple) else getattr(each, "name", "") for each in made}
    return compare(
        *made, workload=workload, repeats=repeats, seconds=seconds, once=labels & set(once), memory=memory,
        notes=refused, progress=progress, show=show,
    )  # fmt: skip
