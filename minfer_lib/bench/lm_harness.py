"""EleutherAI's lm-evaluation-harness on `LLMEngine`: `pip install "minfer[lm-eval]"`, then

    import lm_eval
    from minfer_lib import LLMEngine
    from minfer_lib.bench.lm_harness import MinferLM

    lm_eval.simple_evaluate(MinferLM(LLMEngine("Qwen/Qwen2.5-0.5B")), tasks=["hellaswag"])

Invariant: everything that is scored was computed by the engine, step by step, in its cache and with its kernels, so
that a task finds what an engine gets wrong and not only what the weights are worth. A continuation is scored by making
the engine say it: a logits processor notes the log-probability of each of its tokens, and lets no other be chosen. One
step for each token is slow for long texts; for tasks of multiple choice it is a step or a few, and with a paged cache
the choices share the blocks of their question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..engine.llm_engine import LLMEngine
from ..errors import BadEnvironment, GenerationFailed, InvalidParameter
from ..generation.params import SamplingParams
from ..generation.request import RequestOutput

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise BadEnvironment(
        f'lm-evaluation-harness cannot be imported ({error}). Run `pip install "minfer[lm-eval]"`.'
    ) from error

DEFAULT_MAX_GEN_TOKENS = 256  # of an answer whose task names no limit, as for the harness's own models
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # of a task, which mean the same here


class MinferLM(TemplateLM):
    """An engine as a model of the harness. Raises `InvalidParameter` for a model without a tokenizer."""

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__()
        if engine.lm.tokenizer is None:
            raise InvalidParameter(
                f"{engine.lm.name} has no tokenizer, and tasks are texts. Load a model that has one."
            )
        self.engine, self.tokenizer = engine, engine.lm.tokenizer
        self.max_length = engine.max_model_len - 1  # what is left beside one token of context

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.engine.lm.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids as the tokenizer gives them, its BOS in front where it puts one, and no second one."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """For each (texts, context, continuation): log p(continuation | context), and whether it is the greedy one."""
        prompts, params, notes = [], [], []
        for _texts, context, continuation in requests:
            ids = (context + continuation)[-(self.max_length + 1) :]
            if not continuation or len(continuation) >= len(ids):
                raise InvalidParameter(
                    f"A continuation of {len(continuation)} tokens was to be scored; it needs one or more, one of "
                    f"context, and {self.engine.max_model_len} together at most. Make the engine with a larger "
                    "max_model_len."
                )
            note: dict[int, tuple[float, bool]] = {}
            prompts.append(ids[: -len(continuation)])
            params.append(
                SamplingParams(len(continuation), ignore_eos=True, logits_processors=[saying(continuation, note)])
            )
            notes.append(note)
        self._generate(prompts, params)
        return [(sum(p for p, _ in note.values()), all(greedy for _, greedy in note.values())) for note in notes]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, each token once, after at most `max_length` tokens before it."""
        windows, counts = [], []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            found = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            before = len(windows)
            windows += [(None, *make_disjoint_window(window)) for window in found]
            counts.append(len(windows) - before)
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers that end before the first of their stop strings; contexts that are too long lose their beginning."""
        prompts, params = [], []
        for request in requests:
            context, asked = request.args
            own = self._params(asked)
            room = self.engine.max_model_len - own.max_tokens
            if room < 1:
                raise InvalidParameter(
                    f"A task asks for {own.max_tokens} tokens, and the engine takes {self.engine.max_model_len} with "
                    "the prompt. Make it with a larger max_model_len, or pass gen_kwargs with a smaller max_gen_toks."
                )
            prompts.append(self.tok_encode(context)[-room:])
            params.append(own)
        return [out.text for out in self._generate(prompts, params)]

    def _params(self, asked: dict[str, Any]) -> SamplingParams:
        """What a task asks for; greedy unless it says do_sample."""
        asked = dict(asked)
        until = asked.pop("until", None) or []
        until = [until] if isinstance(until, str) else until
        limit = asked.pop("max_gen_toks", DEFAULT_MAX_GEN_TOKENS)
        options = {name: asked.pop(name) for name in SAMPLING if name in asked}
        if not asked.pop("do_sample", options.get("temperature", 0) > 0):
            options["temperature"] = 0.0
        if asked:
            raise InvalidParameter(f"A task asks for {', '.join(asked)}, which has no meaning here.")
        return SamplingParams(limit, stop=[text for text in until if text] or None, **options)

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        outputs = self.engine.generate(prompts, params)
        for out in outputs:
            if out.finish_reason not in ("stop", "length"):
                raise GenerationFailed(f"A request of the harness ended with {out.finish_reason}: {out.error}")
        return outputs


def saying(script: Sequence[int], note: dict[int, tuple[float, bool]]) -> Callable[..., torch.Tensor]:
    """A logits processor that makes the engine say these tokens, and notes of each its log-probability and whether it
    was the likeliest. After a step that was broken off it notes the same again."""

    def processor(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        place, token = len(token_ids), script[len(token_ids)]
        note[place] = float(logits.log_softmax(-1)[token]), int(logits.argmax()) == token
        return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([token], device=logits.device), 0.0)

    return processor
