"""The exercises of chapter 4: stubs fail, solutions pass, every typical mistake is told apart from the others."""

import itertools
import random
import re
from typing import ClassVar

import pytest
from exercise_checks import ExerciseChecks

from minfer_lib import LLMEngine, SamplingParams, load_model
from minfer_lib.learn import plots
from minfer_lib.learn.checks import ch04

# -- how a learner might solve them ---------------------------------------------------------------------------------


def padding_share(prompt_lens, output_lens):
    columns = max(prompt_lens) + max(output_lens) - 1
    needed = sum(p + o - 1 for p, o in zip(prompt_lens, output_lens, strict=True))
    return 1 - needed / (len(prompt_lens) * columns)


def pack(chunks):
    input_ids, position_ids, last_rows = [], [], []
    for token_ids, num_computed in chunks:
        input_ids += token_ids
        position_ids += range(num_computed, num_computed + len(token_ids))
        last_rows.append(len(input_ids) - 1)
    return input_ids, position_ids, last_rows


def schedule(running, waiting, budget, max_num_seqs):
    step = {}
    decodes = [(name, 1) for name, left in running if left == 0]
    prompts = [(name, left) for name, left in running if left > 0]
    free = max(0, max_num_seqs - len(running))
    for name, wanted in decodes + prompts + waiting[:free]:
        if budget == 0:
            break
        step[name] = min(wanted, budget)
        budget -= step[name]
    return step


def may_attend(owner, position):
    tokens = list(zip(owner, position, strict=True))
    return [[o == other and q <= p for other, q in tokens] for o, p in tokens]


def throughput_bound(weight_bytes, kv_bytes_per_request, batch, bandwidth):
    seconds = (weight_bytes + batch * kv_bytes_per_request) / bandwidth
    return batch / seconds


class TestExercises(ExerciseChecks):
    chapter = ch04
    solutions: ClassVar = {f.__name__: f for f in (padding_share, pack, schedule, may_attend, throughput_bound)}


# -- the solutions against the package --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm():
    return load_model("tiny-random", device="cpu")


def test_what_padding_costs_is_what_is_drawn():
    prompts, outputs = [16, 128, 40], [128, 16, 1]
    found = plots.static_batch_waste(prompts, outputs).alt
    shares = [int(n) for n in re.findall(r"(\d+)%", found)]
    assert shares and sum(shares) == pytest.approx(100 * padding_share(prompts, outputs), abs=1)


def test_the_engine_computes_what_was_needed_and_nothing_else(lm):
    prompts, outputs = [3, 17, 9], [6, 2, 4]
    engine = LLMEngine(lm, max_model_len=64)
    engine.generate([[5] * n for n in prompts], [SamplingParams(max_tokens=n, ignore_eos=True) for n in outputs])
    rectangle = len(prompts) * (max(prompts) + max(outputs) - 1)
    assert engine.stats()["computed_tokens"] == round(rectangle * (1 - padding_share(prompts, outputs)))


def test_rows_and_schedules_are_those_of_the_engine(lm):
    """Every step of a run: the exercise's schedule, and its packed row against the inputs that the runner builds."""
    engine = LLMEngine(lm, max_num_seqs=3, max_num_batched_tokens=7, max_model_len=64)
    built, build = [], engine.runner.build

    def spy(plan):
        new = {r.request_id for r in plan} - {r.request_id for r in before}
        one_first = sorted(plan.items(), key=lambda item: item[1] > 1)
        row = [(r.tokens(r.num_computed, r.num_computed + n), r.num_computed) for r, n in one_first]
        running = [(r.request_id, max(0, len(r.prompt_token_ids) - r.num_computed)) for r in before]
        everybody = [r for r in engine.scheduler.running if r.request_id in new] + engine.scheduler.waiting
        waiting = [(r.request_id, len(r.prompt_token_ids)) for r in everybody]
        expected = schedule(running, waiting, 7, 3)
        assert {r.request_id: tokens for r, tokens in plan.items()} == expected
        inputs = build(plan)
        built.append((pack(row), inputs))
        return inputs

    engine.runner.build = spy
    rng = random.Random(0)
    for _ in range(7):
        engine.add_request([rng.randrange(3, 200) for _ in range(rng.randint(1, 15))], SamplingParams(max_tokens=4))
    while engine.has_unfinished():
        before = [r for r in engine.scheduler.running if not r.finished]
        engine.step()
    assert len(built) > 8
    for (input_ids, position_ids, _), inputs in built:
        assert inputs.input_ids.flatten().tolist() == input_ids
        assert inputs.position_ids.flatten().tolist() == position_ids


def test_the_mask_of_a_row_is_a_triangle_for_each_request():
    lengths, computed = [1, 4, 3], [9, 0, 5]
    owner = [n for n, length in enumerate(lengths) for _ in range(length)]
    position = [first + k for first, length in zip(computed, lengths, strict=True) for k in range(length)]
    mask = may_attend(owner, position)
    for i, j in itertools.product(range(len(owner)), repeat=2):
        assert mask[i][j] == (owner[i] == owner[j] and j <= i)
    assert sum(map(sum, mask)) == sum(n * (n + 1) // 2 for n in lengths)


def test_answers_may_be_written_in_other_ways():
    import torch

    def with_tensors(owner, position):
        owner, position = torch.tensor(owner), torch.tensor(position)
        return (owner[:, None] == owner[None]) & (position[None] <= position[:, None])

    def pack_with_tensors(chunks):
        return tuple(torch.tensor(part) for part in pack(chunks))

    assert ch04.check_may_attend.check(with_tensors) and ch04.check_pack.check(pack_with_tensors)
    assert ch04.check_throughput_bound.check(lambda w, kv, n, bw: bw / (w / n + kv))
