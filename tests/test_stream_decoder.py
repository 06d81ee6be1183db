"""Text from tokens, one at a time: pieces join to the full decode, and none holds half a character."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minfer_lib import LanguageModel
from minfer_lib.errors import InvalidPrompt
from minfer_lib.models.shapes import byte_tokenizer
from minfer_lib.models.tokenizer import REPLACEMENT, StreamDecoder, apply_chat, decode, encode

TEXTS = {
    "plain": "Hello, big world. It's 5 o'clock  (really)!",
    "accents": "Çà et là, naïve Ærøskøbing",
    "combining": "e\u0301 a\u0308 n\u0303 o\u0302\u0323 Z\u0351\u036b\u0343",
    "cjk": "你好，世界。日本語テキスト 한국어 텍스트",
    "emoji": "ok 👍🏽 👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇩🇪 🧑🏿\u200d🚀 end",
    "devanagari": "नमस्ते दुनिया, क्षत्रिय",
    "mixed": "a你👍é\n\tनb  x\u200d",
    "thai and arabic": "สวัสดีครับ مرحبا بالعالم",
    "rare": "𒀀𓀀𐍈 \U0010fffd",
    "whitespace": "  two  spaces \n\n lines\t",
}


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: spaces are "▁" in front of words, and characters beyond the vocabulary are byte tokens."""
    words = [
        "▁Hello",
        "▁hello",
        "▁big",
        "▁world",
        "▁",
        "▁ok",
        "▁end",
        "world",
        "ll",
        ",",
        ".",
        *"abcdefghijklmnopqrstuvwxyzHI",
    ]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)] + [(f"<0x{b:02X}>", -20.0) for b in range(256)]
    backend = Tokenizer(models.Unigram(vocabulary + [(w, -1.0 - i / 100) for i, w in enumerate(words)], 0, True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    """The same idea with the Metaspace pre-tokenizer and decoder, as T5 and XGLM have it; whole words only."""
    words = ["▁Hello", "▁big", "▁world", "▁", *"abcdefghijklmnopqrstuvwxyzHI.,"]
    backend = Tokenizer(models.Unigram([("<unk>", 0.0)] + [(w, -1.0 - i / 100) for i, w in enumerate(words)], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


BYTES, PIECES, WORDS = byte_tokenizer(), sentencepiece(), metaspace()
TOKENIZERS = {"bytes": BYTES, "sentencepiece": PIECES}


def stream(tokenizer: PreTrainedTokenizerFast, prompt: list[int], ids: list[int], **options) -> list[str]:
    """Every piece, that of the flush last."""
    decoder = StreamDecoder(tokenizer, prompt, **options)
    return [decoder.step(token) for token in ids] + [decoder.flush()]


def check_splits(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> None:
    """For each prompt that ends between two characters the pieces are what it adds to the text, and whole."""
    whole = decode(tokenizer, ids)
    for split in range(1, len(ids)):
        before = decode(tokenizer, ids[:split])
        if before.endswith(REPLACEMENT) or not whole.startswith(before):
            continue  # inside a character; tested by itself
        pieces = stream(tokenizer, ids[:split], ids[split:])
        assert "".join(pieces) == whole[len(before) :], (split, pieces)
        assert not any(REPLACEMENT in piece for piece in pieces), (split, pieces)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_join_to_the_full_text(kind: str, name: str):
    tokenizer = TOKENIZERS[kind]
    ids = encode(tokenizer, TEXTS[name])
    assert decode(tokenizer, ids) == TEXTS[name]
    check_splits(tokenizer, ids)


@pytest.mark.parametrize("name", TEXTS)
def test_pieces_join_on_the_real_tokenizer(smollm2: LanguageModel, name: str):
    ids = smollm2.encode(TEXTS[name])
    assert smollm2.decode(ids) == TEXTS[name]
    check_splits(smollm2.tokenizer, ids)
    chat = smollm2.chat_ids("Say it.")
    assert "".join(stream(smollm2.tokenizer, chat, ids)) == TEXTS[name]


def test_spaces_of_words_survive():
    ids = encode(PIECES, "Hello big world")
    assert [decode(PIECES, [i]) for i in ids] == ["Hello", "big", "world"]  # decoded one by one they are lost
    assert stream(PIECES, ids[:1], ids[1:]) == [" big", " world", ""]
    ids = encode(WORDS, "Hello big world")
    assert stream(WORDS, ids[:1], ids[1:]) == [" big", " world", ""]


def test_a_character_comes_when_it_is_complete_and_not_before():
    ids = encode(BYTES, "a你👍b")
    assert stream(BYTES, [33], ids) == ["a", "", "", "你", "", "", "", "👍", "b", ""]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", ["cjk", "emoji", "devanagari", "rare", "mixed"])
def test_a_prompt_that_ends_inside_a_character(kind: str, name: str):
    """The character that the answer completes comes whole; what stood before it is not repeated."""
    tokenizer, text = TOKENIZERS[kind], TEXTS[name]
    ids = encode(tokenizer, text)
    starts = [len(encode(tokenizer, text[:i])) for i in range(len(text) + 1)]  # tokens before each character
    inside = 0
    for split in range(1, len(ids)):
        character = max(i for i, start in enumerate(starts[:-1]) if start <= split)
        if starts[character] == split:
            continue
        inside += 1
        pieces = stream(tokenizer, ids[:split], ids[split:])
        assert "".join(pieces) == text[character:], (split, pieces)
        assert not any(REPLACEMENT in piece for piece in pieces)
    assert inside > 5


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("rest", ["ab", " ab 你 c", "é"])
@pytest.mark.parametrize("begin", ["", "x", "the 你好", "👍👍👍👍"])
def test_a_prompts_broken_character_is_not_the_answers(kind: str, begin: str, rest: str):
    """The prompt ends inside a character and the answer does not complete it: its U+FFFD is the prompt's own."""
    tokenizer = TOKENIZERS[kind]
    first = {"bytes": 0, "sentencepiece": 3}[kind]  # id of byte 0
    new = [first + b for b in rest.encode()] if kind == "bytes" else encode(tokenizer, "a" + rest)[1:]
    new = [t for t in new if t != tokenizer.convert_tokens_to_ids("▁a")]
    for broken in ([0xE4], [0xE4, 0xBD], [0xF0, 0x9F, 0x91]):
        prompt = encode(tokenizer, begin) + [first + b for b in broken]
        pieces = stream(tokenizer, prompt, new)
        if kind == "bytes" or ord(rest[0]) < 128:  # a run of bytes that is broken anywhere is lost to SentencePiece
            assert "".join(pieces).endswith(rest) and len("".join(pieces)) <= len(rest) + 1
            assert not any(REPLACEMENT in piece for piece in pieces), pieces


@pytest.mark.parametrize("prompt", ["ab\ufffd", "\ufffd", "\ufffd\ufffd\ufffd x \ufffd"])
def test_a_prompt_with_a_replacement_character_of_its_own(prompt: str):
    assert stream(BYTES, encode(BYTES, prompt), encode(BYTES, "né")) == ["n", "", "é", ""]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_end_inside_a_character(kind: str):
    tokenizer = TOKENIZERS[kind]
    ids = encode(tokenizer, "ok 👍")
    for missing in (1, 2, 3):
        pieces = stream(tokenizer, ids[:1], ids[1:-missing])
        assert "".join(pieces) == decode(tokenizer, ids[:-4])[len(decode(tokenizer, ids[:1])) :]
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_flush_releases_whole_characters_in_front_of_a_broken_one():
    """A token may hold the end of one character and the beginning of the next."""
    backend = Tokenizer(models.BPE(vocab={**{c: i for i, c in enumerate("abĠÃ©")}, "bÃ": 5}, merges=[("b", "Ã")]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    decoder = StreamDecoder(tokenizer, [0])
    assert [decoder.step(5), decoder.flush(), decoder.flush()] == ["", "b", ""]
    assert stream(tokenizer, [0], [5, 4]) == ["", "bé", ""]


def test_special_tokens_are_left_out_or_shown():
    ids = [ord("a"), 257, ord("b"), 258]
    assert stream(BYTES, [33], ids) == ["a", "", "b", "", ""]
    assert stream(BYTES, [33], ids, skip_special_tokens=False) == ["a", "<|im_start|>", "b", "<|im_end|>", ""]
    assert "".join(stream(PIECES, encode(PIECES, "Hello"), [2, 2, *encode(PIECES, "big")])) == " big"


def test_without_a_tokenizer_there_is_no_text():
    assert stream(None, [1, 2], [3, 4]) == ["", "", ""]


def test_no_prompt_at_all():
    assert "".join(stream(BYTES, [], encode(BYTES, "né你"))) == "né你"


characters = st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT)


@settings(max_examples=200, deadline=None)
@given(text=st.text(characters, min_size=1, max_size=25), split=st.integers(0, 60))
@example(text="你好你好你好你", split=2)
def test_bytes_of_any_text_cut_anywhere(text: str, split: int):
    ids = list(text.encode())
    split = min(split, len(ids))
    before = bytes(ids[:split]).decode(errors="ignore")  # a character that is cut belongs to the answer
    pieces = stream(BYTES, ids[:split], ids[split:])
    expected = "" if split == len(ids) else text[len(before) :]
    assert "".join(pieces) == expected and not any(REPLACEMENT in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(new=st.binary(max_size=40))
def test_any_bytes_at_all(new: bytes):
    """Where the model writes bytes that are no text, the pieces still join to the full decode, and never change."""
    prompt = list(b"say: ")
    whole = decode(BYTES, prompt + list(new))[len(prompt) :]
    decoder, joined = StreamDecoder(BYTES, prompt), ""
    for token in new:
        joined += decoder.step(token)
        assert whole.startswith(joined)
    assert joined + decoder.flush() == whole.rstrip(REPLACEMENT)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.one_of(st.sampled_from("Hello big world ,.é你👍\u200d"), characters), min_size=1, max_size=20))
def test_any_text_with_byte_fallback(text: str):
    text = text.replace("▁", "_")  # which is how this tokenizer writes a space
    check_splits(PIECES, encode(PIECES, text))


# -- the calls around it ----------------------------------------------------------------------------------------------


def test_decode_moves_no_spaces():
    tokenizer = sentencepiece()
    tokenizer.clean_up_tokenization_spaces = True  # as some folders ask for: "a , b" would become "a, b"
    ids = encode(tokenizer, "a , b . do n't")
    assert decode(tokenizer, ids) == "a , b . do n't"
    check_splits(tokenizer, ids)


def test_text_that_is_no_text():
    with pytest.raises(InvalidPrompt, match="not valid Unicode"):
        encode(BYTES, "half of a pair: \ud83d")


def test_chat_template(tiny: LanguageModel):
    ids = tiny.chat_ids("Hi")
    assert tiny.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    assert tiny.decode(tiny.chat_ids(messages), False).startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user")
    assert type(ids) is list and all(type(i) is int for i in ids)


def test_chat_that_does_not_fit():
    with pytest.raises(InvalidPrompt, match="no chat template"):
        apply_chat(PIECES, "Hi")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('user and assistant must alternate') }}"
    with pytest.raises(InvalidPrompt, match="must alternate"):
        apply_chat(tokenizer, "Hi")
    for messages in (["Hi"], [5], {"role": "user"}, [], 5, [{"content": "Hi"}]):
        with pytest.raises(InvalidPrompt, match="dict such as"):
            apply_chat(byte_tokenizer(), messages)


def test_smollm2_chat_holds_each_special_token_once(smollm2: LanguageModel):
    shown = smollm2.decode(smollm2.chat_ids("Hi"), skip_special_tokens=False)
    assert shown.count("<|im_start|>") == 3 and shown.endswith("<|im_start|>assistant\n")
    assert smollm2.tokenizer.eos_token_id in smollm2.eos_ids
