"""minfer: an LLM inference engine, built chapter by chapter.

Reading order of the modules is that of the chapters: errors, environment, loading (with packaged and shapes),
tokenizer, memory; params, sampling, stopping, request, naive; kv_cache, cached. Beside the engine stand `bench`, which
measures it, and `learn`, which the notebooks draw and explain with; the engine imports neither.
"""

from .environment import check_versions

check_versions()  # before anything that imports torch or transformers

from .cached import CachedEngine  # noqa: E402
from .errors import MinferError  # noqa: E402
from .loading import LanguageModel, load_model  # noqa: E402
from .naive import NaiveEngine  # noqa: E402
from .params import SamplingParams  # noqa: E402
from .request import RequestMetrics, RequestOutput, StreamPiece  # noqa: E402

__all__ = [
    "CachedEngine",
    "LanguageModel",
    "MinferError",
    "NaiveEngine",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamPiece",
    "load_model",
]
