"""lm-evaluation-harness on the engine gives what the model gives in one forward pass, and what the harness's own class
for transformers gives."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval", reason='lm-evaluation-harness is not installed: pip install -e ".[lm-eval]"')

from lm_eval.api.instance import Instance

from minfer_lib import LLMEngine, load_model
from minfer_lib.bench.lm_harness import MinferLM
from minfer_lib.errors import InvalidParameter

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do."
PAIRS = [("Hello", " world"), ("", "A text alone"), ("A question? ", "yes"), ("A question? ", "no"), (TEXT, " Once")]


@pytest.fixture(scope="module")
def lm():
    return load_model("tiny-random", device="cpu")


@pytest.fixture(scope="module", params=["slots", "paged"])
def model(lm, request):
    return MinferLM(LLMEngine(lm, kv_cache=request.param, max_model_len=64, max_num_seqs=3))


def instances(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def direct(lm, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One forward pass of the model as it was loaded."""
    with torch.no_grad():
        logits = lm.model(torch.tensor([context + continuation])).logits[0].double()
    rows = logits[len(context) - 1 : -1]
    score = rows.log_softmax(-1)[torch.arange(len(continuation)), continuation].sum()
    return float(score), rows.argmax(-1).tolist() == continuation


def test_loglikelihoods_are_those_of_one_forward_pass(lm, model):
    asked = [*PAIRS, ("abc", model.tokenizer.decode(greedy(lm, "abc", 3)))]
    found = model.loglikelihood(instances("loglikelihood", *asked), disable_tqdm=True)
    for (context, continuation), (score, is_greedy) in zip(asked, found, strict=True):
        split = model._encode_pair(context, continuation) if context else ([1], lm.tokenizer.encode(continuation))
        ids, rest = ([model.prefix_token_id], split[1]) if not context else split
        ids = (ids + rest)[-64:][: -len(rest)]  # a context that is too long loses its beginning
        assert (pytest.approx(score, abs=1e-3), is_greedy) == direct(lm, ids, rest)


def greedy(lm, text: str, n: int) -> list[int]:
    ids = torch.tensor([lm.encode(text)])
    out = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def test_rolling_windows_score_each_token_once(lm, model):
    ids = model.tok_encode(TEXT)
    assert len(ids) > 63  # more than one window
    (found,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", (TEXT,)))
    first = direct(lm, [model.prefix_token_id], ids[:63])[0]
    rest = ids[63:]
    before = [model.prefix_token_id, *ids][len(ids) + 1 - 64 : len(ids) + 1 - len(rest)]
    assert found == pytest.approx(first + direct(lm, before, rest)[0], abs=1e-2)


def test_answers_stop_where_the_task_says(lm, model):
    free, other = model.generate_until(
        instances("generate_until", ("Hello", {"until": [], "max_gen_toks": 12}), ("Oh", {"max_gen_toks": 5}))
    )
    stop = free[4:6]
    cut = model.generate_until(
        instances("generate_until", ("Hello", {"until": stop, "max_gen_toks": 12, "do_sample": False}))
    )
    assert cut == [free[: free.index(stop)]] and len(other) <= 5
    sampled = [{"max_gen_toks": 12, "do_sample": True, "temperature": 5.0}]
    assert model.generate_until(instances("generate_until", ("Hello", *sampled))) != [free]


def test_what_cannot_be_done_is_refused(lm, model):
    with pytest.raises(InvalidParameter, match="num_beams, which has no meaning here"):
        model.generate_until(instances("generate_until", ("Hello", {"num_beams": 4})))
    with pytest.raises(InvalidParameter, match="asks for 256 tokens, and the engine takes 64"):
        model.generate_until(instances("generate_until", ("Hello", {})))
    with pytest.raises(InvalidParameter, match="A continuation of 0 tokens"):
        model._loglikelihood_tokens([(None, [3, 4], [])])
    with pytest.raises(InvalidParameter, match="A continuation of 64 tokens"):
        model._loglikelihood_tokens([(None, [3, 4], [5] * 64)])
    bare = SimpleNamespace(lm=SimpleNamespace(tokenizer=None, name="shape:x"))
    with pytest.raises(InvalidParameter, match="shape:x has no tokenizer"):
        MinferLM(bare)


def test_a_made_up_task_gives_what_the_harness_gives_with_transformers(lm, model, tmp_path):
    """Multiple choice by log-likelihood, run by the harness from its task file to its score."""
    import json

    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rows = [
        {"q": f"Which letter comes after {a}?", "choices": list("bdf"), "gold": i % 3} for i, a in enumerate("aceace")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "letters.yaml").write_text(
        f"""
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_target: gold
doc_to_choice: choices
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    theirs = HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, backend="causal", batch_size=2, max_length=63)
    results = [
        lm_eval.simple_evaluate(each, tasks=["letters"], task_manager=manager, bootstrap_iters=0, log_samples=True)
        for each in (model, theirs)
    ]
    ours, wanted = ([sample["filtered_resps"] for sample in r["samples"]["letters"]] for r in results)
    assert len(ours) == 6
    for row, other in zip(ours, wanted, strict=True):
        assert [float(score) for score, _ in row] == pytest.approx([float(score) for score, _ in other], abs=1e-3)
    scores = [{k: v for k, v in r["results"]["letters"].items() if k.startswith("acc")} for r in results]
    assert scores[0] == scores[1]
