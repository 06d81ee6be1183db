"""Quality figures against straightforward computations, and refusals of what cannot be compared."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minfer_lib.bench import english_text, load, perplexity, quality, quality_scores
from minfer_lib.bench.settings import FAST_LABEL
from minfer_lib.errors import InvalidParameter, InvalidPrompt, UnsupportedModel
from minfer_lib.models.load import LanguageModel, load_model
from minfer_lib.models.memory import PeakMemory


@pytest.fixture(autouse=True)
def full_length(monkeypatch):
    monkeypatch.delenv("MINFER_FAST", raising=False)


def copied(lm: LanguageModel) -> LanguageModel:
    return LanguageModel.of(copy.deepcopy(lm.model), lm.tokenizer, "a copy")


def disturbed(lm: LanguageModel, by: float) -> LanguageModel:
    """A copy with noise in every matrix, of so many parts of its own spread."""
    other = copied(lm)
    generator = torch.Generator().manual_seed(0)
    for module in other.model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            noise = torch.randn(module.weight.shape, generator=generator)
            module.weight.data += by * module.weight.std() * noise
    return other


@pytest.fixture(scope="module")
def sharp(tiny):
    """tiny-random with a head ten times as large: its own choices are then far apart, as those of real models are."""
    lm = copied(tiny)
    lm.model.lm_head.weight = nn.Parameter(10 * lm.model.lm_head.weight, requires_grad=False)
    return lm


def later_text() -> str:
    text = english_text()
    return text[text.index("CHAPTER V\n") :]


def log_probs(lm, ids):
    with torch.no_grad():
        return F.log_softmax(lm.model(torch.tensor([ids])).logits[0].double(), -1)


def test_perplexity_is_that_of_transformers_own_loss(tiny):
    ids = tiny.encode(later_text())[:300]
    losses = []
    for begin in range(0, 300, 64):  # the last window has 44 tokens
        piece = torch.tensor([ids[begin : begin + 64]])
        with torch.no_grad():
            losses.append((tiny.model(piece, labels=piece).loss.item(), piece.shape[1] - 1))
    count = sum(n for _, n in losses)
    expected = math.exp(sum(loss * n for loss, n in losses) / count)
    assert perplexity(tiny, tokens=300, window=64, progress=False) == pytest.approx(expected, rel=1e-6)
    table = quality(tiny, {"copy": copied(tiny)}, tokens=300, window=64, progress=False)
    assert table.rows[0].perplexity == pytest.approx(expected, rel=1e-6) and table.rows[0].tokens == count == 295


@pytest.mark.parametrize("piece", [1, 7, 32, 1000])
def test_kl_and_agreement_are_those_of_all_logits_at_once(sharp, monkeypatch, piece):
    monkeypatch.setattr(quality_scores, "PIECE", piece)
    other = disturbed(sharp, 0.3)
    row = quality(sharp, {"disturbed": other}, tokens=150, window=60, progress=False).row("disturbed")
    ids = sharp.encode(later_text())[:150]
    kl, same, nll, count = 0.0, 0, 0.0, 0
    for window in (ids[:60], ids[60:120], ids[120:]):
        p, q = log_probs(sharp, window)[:-1], log_probs(other, window)[:-1]
        kl += (p.exp() * (p - q)).sum().item()
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
        nll -= sum(q[i, token].item() for i, token in enumerate(window[1:]))
        count += len(window) - 1
    assert row.tokens == count == 147
    assert row.kl == pytest.approx(kl / count, rel=1e-4) and row.kl > 0.001
    assert row.top1 == same / count and 0.1 < row.top1 < 0.95
    assert row.top1_stderr == pytest.approx(math.sqrt(row.top1 * (1 - row.top1) / count))
    assert row.perplexity == pytest.approx(math.exp(nll / count), rel=1e-5)


def test_the_same_model_keeps_everything_and_more_noise_keeps_less(sharp):
    others = {"copy": copied(sharp), "little": disturbed(sharp, 0.02), "much": disturbed(sharp, 0.3)}
    table = quality(("whole", sharp), others, tokens=200, window=100, progress=False)
    assert [row.name for row in table.rows] == ["whole", "copy", "little", "much"]
    for row in table.rows[:2]:
        assert (row.kl, row.top1, row.top1_stderr, row.perplexity_change) == (0, 1, 0, 0)
    little, much = table.row("little"), table.row("much")
    assert 0 < little.kl < much.kl and 1 > little.top1 > much.top1
    assert much.perplexity_change == pytest.approx(much.perplexity / table.rows[0].perplexity - 1)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "opt", "qwen3_moe"])
def test_logits_that_are_changed_after_the_head_are_not_lost(family, name):
    lm = family(name)
    ids = [token % lm.vocab_size for token in range(5, 95)]
    reader = quality_scores.Reader(lm, ids)
    assert reader.in_pieces == (name != "gemma2")  # which squashes its logits
    windows = [ids[:40], ids[40:80], ids[80:]]
    nll = sum(F.nll_loss(log_probs(lm, w)[:-1], torch.tensor(w[1:]), reduction="sum").item() for w in windows)
    found = perplexity(lm, ids=ids, window=40, progress=False)
    assert found == pytest.approx(math.exp(nll / 87), rel=1e-5)


def test_all_logits_of_a_window_are_never_there_at_once(tiny, monkeypatch):
    with PeakMemory() as in_pieces:
        perplexity(tiny, tokens=240, window=240, progress=False)
    monkeypatch.setattr(quality_scores, "PIECE", 240)
    with PeakMemory() as at_once:
        perplexity(tiny, tokens=240, window=240, progress=False)
    spared = (239 - 32) * tiny.vocab_size * 8  # bytes of log-probabilities, in float64
    assert in_pieces.peak_bytes < at_once.peak_bytes - spared


def test_the_default_text_is_long_enough_and_away_from_the_prompts(smollm2):
    windows, record = quality_scores.windows_of([smollm2], None, 512, None, None)
    assert record["tokens"] == 8192 == sum(map(len, windows)) and record["predictions"] == 8192 - 16
    assert smollm2.decode(windows[0]).startswith("CHAPTER V\n")
    assert len(smollm2.encode(later_text())) > 20_000 and len(smollm2.encode(english_text())) > 35_000


def test_a_bos_begins_every_window_and_predicts_the_first_token(tiny):
    class WithBos(LanguageModel):
        def encode(self, text):
            return [self.tokenizer.bos_token_id, *super().encode(text)]

    lm = WithBos.of(tiny.model, tiny.tokenizer, "with bos")
    windows, record = quality_scores.windows_of([lm], 100, 40, None, None)
    assert all(window[0] == tiny.tokenizer.bos_token_id for window in windows)
    assert [token for window in windows for token in window[1:]] == tiny.encode(later_text())[:100]
    assert list(map(len, windows)) == [40, 40, 23] and record["predictions"] == 100


def test_own_texts_and_ids_are_read_whole(tiny):
    text = "It was a dark and stormy night."
    found = perplexity(tiny, text=text, progress=False)
    assert found == perplexity(tiny, ids=torch.tensor(tiny.encode(text)), progress=False)
    assert found != perplexity(tiny, text=text, tokens=20, progress=False)
    # 33 = 2 x 16 + 1: the last token has a window to itself, and nothing to predict there
    windows, record = quality_scores.windows_of([tiny], 33, 16, None, list(range(33)))
    assert list(map(len, windows)) == [16, 16] and record["predictions"] == 30


def test_fast_mode_is_short_and_says_so(tiny, monkeypatch):
    monkeypatch.setenv("MINFER_FAST", "1")
    table = quality(tiny, {"copy": copied(tiny)}, window=100, progress=False)
    assert table.workload["tokens"] == 512 and table.workload["fast"] and table.rows[0].tokens == 512 - 6
    assert FAST_LABEL in str(table) and f"<strong>{FAST_LABEL}</strong>" in table._repr_html_()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(window=1), "from 2 to"),
        (dict(window=10**6), "from 2 to"),
        (dict(window=2.5), "from 2 to"),
        (dict(tokens=1), "2 or more"),
        (dict(tokens=True), "2 or more"),
        (dict(tokens=10**7), r"chapter V on has \d+"),
        (dict(tokens=50, ids=[1, 2, 3]), "ids given has 3"),
        (dict(text="one", ids=[1, 2]), "one of them"),
        (dict(text="x"), "has 1, and"),
    ],
)
def test_lengths_that_are_not_possible(tiny, wrong, message):
    with pytest.raises(InvalidParameter, match=message):
        perplexity(tiny, progress=False, **wrong)


def test_what_cannot_be_compared_is_refused(tiny, family):
    with pytest.raises(InvalidParameter, match="one and the same model"):
        quality(tiny, {"int8": LanguageModel.of(tiny.model, tiny.tokenizer, "again")})
    with pytest.raises(InvalidParameter, match="vocabulary of 199"):
        quality(tiny, {"llama": family("llama")})
    with pytest.raises(InvalidParameter, match="other names"):
        quality(tiny, {"float32": copied(tiny)})
    with pytest.raises(InvalidParameter, match="none"):
        quality(tiny, {})
    with pytest.raises(InvalidPrompt, match=r"no tokenizer\. Pass token ids instead: ids="):
        perplexity(family("llama"), window=64)
    with pytest.raises(InvalidPrompt, match="Token id 199 is not in the vocabulary"):
        perplexity(family("llama"), window=64, ids=[1, 199])
    other = copied(tiny)
    other.tokenizer = copy.deepcopy(tiny.tokenizer)
    other.tokenizer.add_tokens(["more"])
    with pytest.raises(InvalidParameter, match="different texts"):
        quality(tiny, {"other": other})
    other = copied(tiny)
    other.model.train()
    with pytest.raises(InvalidParameter, match="training mode"):
        quality(tiny, {"other": other}, tokens=20, progress=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(tiny, value):
    broken = copied(tiny)
    broken.model.lm_head.weight = nn.Parameter(broken.model.lm_head.weight.clone(), requires_grad=False)
    broken.model.lm_head.weight[3, 5] = value
    with pytest.raises(UnsupportedModel, match="a copy in float32 gives logits that are not finite"):
        quality(tiny, {"broken": broken}, tokens=20, progress=False)


def test_half_precision_is_compared_with_single(tiny):
    half = load_model("tiny-random", device="cpu", dtype="bfloat16")
    table = quality(tiny, {"bf16": half}, tokens=100, window=50, progress=False)
    assert [row.dtype for row in table.rows] == ["float32", "bfloat16"] == [table.rows[0].name, "bfloat16"]
    assert 0 < table.row("bf16").kl < 0.01
    assert table.row("bf16").bytes == pytest.approx(table.rows[0].bytes / 2, rel=0.01)


def test_a_table_goes_to_json_and_back(tiny, tmp_path):
    table = quality(tiny, {"<b>": disturbed(tiny, 0.1)}, tokens=60, window=30, progress=False)
    again = load(table.save(tmp_path / "quality.json"))
    assert again == table and again.recorded and again.title.startswith("Recorded on 20")
    assert table.provenance["model"] == "tiny-random" and table.provenance["torch"]
    for shown in (str(table), table._repr_html_()):
        assert f"{table.row('<b>').perplexity:,.2f}" in shown and "60 tokens of Alice" in shown and "58" in shown
    assert "<b>" in str(table) and "<b>" not in table._repr_html_()
    picture = table.plot(save=tmp_path / "quality.svg")
    assert "<b>" in picture.alt and (tmp_path / "quality.svg").read_bytes().startswith(b"<?xml")
    with pytest.raises(InvalidParameter, match="no row 'int4'"):
        table.row("int4")
