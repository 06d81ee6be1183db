"""The command line: answers on standard output, everything else on standard error, one sentence for each mistake."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from minfer_lib import __main__ as cli
from minfer_lib import quantize_int8
from minfer_lib.bench import provenance
from minfer_lib.bench.cli import home_as_tilde
from minfer_lib.bench.measurements import Measurements
from minfer_lib.bench.rungs import RUNGS, make_engine, newest
from minfer_lib.errors import GenerationFailed, MinferError, PromptTooLong
from minfer_lib.generation.conversation import fitting
from minfer_lib.generation.params import SamplingParams
from minfer_lib.generation.request import RequestMetrics
from minfer_lib.models import packaged
from minfer_lib.models.load import LanguageModel, load_model
from minfer_lib.quant import products as int8_kernels

TINY = ("--model", "tiny-random", "--device", "cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def lm():
    return load_model("tiny-random", device="cpu")


@pytest.fixture
def run(capsys):
    """Runs a command in this process -> (exit code, standard output, standard error)."""

    def run(*arguments):
        code = cli.main(arguments)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def typed(monkeypatch):
    """Lets `input` return these lines and then end; an exception among them is raised."""

    def typed(*lines):
        rest = iter(lines)

        def answer(prompt=""):
            line = next(rest, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", answer)

    return typed


def expected(lm, prompt, **params) -> str:
    return make_engine("cached", lm).generate(prompt, SamplingParams(**params))[0].text


# -- generate -------------------------------------------------------------------------------------------------------


def test_generate_prints_the_answer_in_the_chat_template_and_nothing_else(lm, run):
    code, out, err = run("generate", "Hello", *TINY, "--max-tokens", "12")
    assert code == 0 and out == expected(lm, lm.chat_ids("Hello"), max_tokens=12) + "\n"
    assert "cut off at the longest length" in err and out.strip() not in err


def test_raw_text_and_a_system_message(lm, run):
    assert (
        run("generate", "Hello", *TINY, "--raw", "--max-tokens", "9")[1] == expected(lm, "Hello", max_tokens=9) + "\n"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    said = run("generate", "Hello", *TINY, "--system", "Be brief.", "--max-tokens", "9")[1]
    assert said == expected(lm, lm.chat_ids(messages), max_tokens=9) + "\n"


@pytest.mark.parametrize("engine", [rung.name for rung in RUNGS if not rung.weights])
def test_every_engine_says_the_same(lm, run, engine):
    code, out, _ = run("generate", "Hello", *TINY, "--engine", engine, "--max-tokens", "12")
    assert code == 0 and out == expected(lm, lm.chat_ids("Hello"), max_tokens=12) + "\n" and len(out) > 5


def test_sampling_options_arrive(lm, run):
    options = ["--max-tokens", "10", "--temperature", "0.9", "--top-k", "20", "--top-p", "0.8", "--min-p", "0.01"]
    out = run("generate", "Hello", *TINY, *options, "--seed", "5", "--repetition-penalty", "1.2")[1]
    params = dict(max_tokens=10, temperature=0.9, top_k=20, top_p=0.8, min_p=0.01, seed=5, repetition_penalty=1.2)
    assert out == expected(lm, lm.chat_ids("Hello"), **params) + "\n"
    assert out != run("generate", "Hello", *TINY, *options, "--seed", "6", "--repetition-penalty", "1.2")[1]


def test_stop_strings_arrive(lm, run):
    text = expected(lm, "Hello", max_tokens=12)
    out = run("generate", "Hello", *TINY, "--raw", "--max-tokens", "12", "--stop", "\0never", "--stop", text[3:5])[1]
    assert out == text[: text.index(text[3:5])] + "\n"


def test_json_is_one_record(lm, run):
    code, out, err = run("generate", "Hello", *TINY, "--json", "--max-tokens", "6", "--raw")
    record = json.loads(out)
    assert code == 0 and err == "" and out.count("\n") == 1
    assert record["text"] == expected(lm, "Hello", max_tokens=6) and len(record["token_ids"]) == 6
    assert record["model"] == "tiny-random" and record["finish_reason"] == "length" and record["prompt_tokens"] == 5
    assert 0 < record["ttft_ms"] <= record["e2e_ms"] and record["tpot_ms"] > 0 and record["error"] is None


def test_stats_go_to_standard_error(run):
    code, out, err = run("generate", "Hello", *TINY, "--max-tokens", "6", "--stats")
    assert code == 0 and f"({newest()}: 6 tokens, the first after" in err and "tokens" not in out


@pytest.mark.parametrize("engine", ["hf", "hf-batch"])
def test_stats_of_an_answer_that_comes_in_one_piece_are_its_own(run, engine):
    """The baselines do not stream: the time between pieces would be none at all."""
    err = run("generate", "Hello", *TINY, "--max-tokens", "6", "--stats", "--engine", engine)[2]
    first, each = re.search(r"6 tokens, the first after ([\d.]+) s, then ([\d.]+) ms each", err).groups()
    assert float(each) > 0.0 and float(first) >= 0.0


def test_stats_say_what_is_not_known(lm, run, monkeypatch):
    class Mute:
        name, max_model_len = "mute", 2048

        def generate(self, prompt, params):
            output = make_engine("hf", lm).generate(prompt, params)[0]
            return [dataclasses.replace(output, metrics=RequestMetrics(arrival=0.0))]

    monkeypatch.setattr(cli, "make_engine", lambda name, lm, **options: Mute())
    err = run("generate", "Hello", *TINY, "--max-tokens", "6", "--stats")[2]
    assert "(mute: 6 tokens, the time of the first is not known)" in err


def test_the_prompt_may_come_from_standard_input(lm, run, monkeypatch, tmp_path):
    (tmp_path / "prompt").write_text("From a file")
    with open(tmp_path / "prompt") as file:
        monkeypatch.setattr(sys, "stdin", file)
        out = run("generate", "-", *TINY, "--max-tokens", "6")[1]
    assert out == expected(lm, lm.chat_ids("From a file"), max_tokens=6) + "\n"


def test_a_model_without_tokenizer_takes_and_gives_ids(lm, run, monkeypatch):
    monkeypatch.setattr(
        "minfer_lib.models.load.load_model", lambda *a, **k: LanguageModel.of(lm.model, None, "ids only")
    )
    code, out, _ = run("generate", "72, 101 108", "--max-tokens", "4")
    ids = make_engine("cached", lm).generate([72, 101, 108], SamplingParams(max_tokens=4))[0].token_ids
    assert code == 0 and out.split() == [str(i) for i in ids]
    code, out, err = run("generate", "Hello")
    assert code == 2 and out == "" and "a list of token ids" in err


# -- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate", "x", "--model", "no-such-model"], "no model `no-such-model`"),
        (["generate", "x", *TINY, "--temperature", "-1"], "temperature"),
        (["generate", "x", *TINY, "--max-tokens", "0"], "max_tokens"),
        (["generate", "x", *TINY, "--dtype", "float8"], "dtype"),
        (["generate", "", *TINY, "--raw"], "no tokens"),
        (["generate", "x" * 3000, *TINY, "--raw"], "leaves no room"),
        (["generate", "x", "--model", "README.md"], "is a file"),
        (["generate", "x", *TINY, "--raw", "--system", "Be brief."], "--raw and --system"),
        (["bench", "ladder", *TINY, "--engines", "warp"], "'warp'"),
        (["bench", "ladder", *TINY, "--batch", "0"], "start at 1"),
        (["bench", "show", "no-such-file.json"], "no-such-file.json"),
        (["bench", "quality", *TINY, "--tokens", "1"], "tokens=1"),
        (["bench", "quality", *TINY, "--window", "9999"], "window=9999"),
        (["quantize", "int8-model", "--model", "tiny-random", "--keep", "no_such_proj"], "'no_such_proj' names no"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(run, arguments, complaint):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and err.startswith("minfer: ") and complaint in err
    assert err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--model", "no-such-model"],
        ["chat", "--model", "no/such/folder"],
        ["generate", "x", "--raw", "--system", "Be brief."],
        ["bench", "ladder", "--model", "no-such-model"],
        ["bench", "ladder", "--engines", "warp"],
        ["bench", "ladder", "--svg", "bars.jpeg2"],
        ["bench", "show", "no-such-file.json", "--svg", "bars"],
        ["bench", "quality", "--json", "tests"],
        ["quantize", "README.md"],
        ["quantize", "int8-model", "--model", "no-such-model"],
    ],
)
def test_what_can_be_told_without_torch_is_told_before_it_is_loaded(arguments):
    code = (
        "import sys\nfrom minfer_lib.__main__ import main\n"
        f"print(main({arguments!r}), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 False False\n" and done.stderr.startswith("minfer: "), done


@pytest.mark.parametrize(
    ("option", "name", "complaint"),
    [
        ("--svg", "bars.jpeg2", "must end in `.svg`, `.png` or `.pdf`"),
        ("--svg", "bars", "must end in"),
        ("--svg", "folder.svg", "is a folder"),
        ("--json", "folder.svg", "is a folder"),
        ("--json", "a file/run.json", "which is a file"),
        ("--svg", "a file/run.svg", "which is a file"),
        ("--json", "locked/run.json", "may not be written"),
        ("--svg", "locked/new/run.svg", "may not be written"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_measuring(run, tmp_path, monkeypatch, option, name, complaint):
    def measured(*args, **options):
        raise AssertionError("measured in vain")

    monkeypatch.setattr("minfer_lib.models.load.load_model", measured)
    (tmp_path / "a file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "locked").mkdir()
    may = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: may(path, mode) and "locked" not in str(path))
    code, out, err = run("bench", "ladder", *TINY, option, str(tmp_path / name))
    assert code == 2 and out == "" and complaint in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "closed", "complaint"),
    [
        ("generate Hello", ">&-", "Standard output is closed"),
        ("info", ">&-", "Standard output is closed"),
        ("generate -", "<&-", "standard input, which is closed"),
        ("chat", "<&-", "standard input, which is closed"),
    ],
)
def test_closed_streams(command, closed, complaint):
    options = "" if command == "info" else " ".join(TINY)
    shell = f"{sys.executable} -m minfer_lib {command} {options} {closed}"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("minfer: "), done
    assert complaint in done.stderr and done.stderr.count("\n") == 1


def test_a_closed_standard_error_sends_nothing_to_standard_output(lm, run, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    code, out, _ = run("generate", "Hello", *TINY, "--max-tokens", "12", "--stats")
    assert code == 0 and out == expected(lm, lm.chat_ids("Hello"), max_tokens=12) + "\n"


@pytest.mark.parametrize("arguments", [[], ["generate"], ["generate", "x", "--engine", "warp"], ["bench"], ["no"]])
def test_bad_usage_is_explained(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2 and "usage: python -m minfer_lib" in capsys.readouterr().err


def test_a_bad_environment_is_a_mistake_too(run, monkeypatch):
    def check():
        raise MinferError("torch is too old.")

    monkeypatch.setattr(cli, "check_versions", check)
    assert run("info") == (2, "", "minfer: torch is too old.\n")


class Streaming:
    """An engine whose stream is what the test says, and that notes whether it was closed."""

    name, max_model_len = "streaming", 2048

    def __init__(self, pieces):
        self.pieces, self.closed, self.prompts = pieces, 0, []

    def stream(self, prompt, params):
        self.prompts.append(prompt)
        try:
            for piece in self.pieces:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.closed += 1


@pytest.fixture
def with_engine(monkeypatch):
    def use(pieces):
        engine = Streaming(pieces)
        monkeypatch.setattr(cli, "make_engine", lambda name, lm, **options: engine)
        return engine

    return use


def some_pieces(lm):
    return list(make_engine("cached", lm).stream("Hello", SamplingParams(max_tokens=5)))


def test_ctrl_c_ends_an_answer_cleanly(lm, run, with_engine):
    pieces = some_pieces(lm)
    engine = with_engine([*pieces[:2], KeyboardInterrupt(), *pieces[2:]])
    code, out, err = run("generate", "Hello", *TINY)
    assert code == 130 and out == pieces[0].text + pieces[1].text + "\n" and err == "(stopped)\n"
    assert engine.closed == 1


def test_ctrl_c_while_loading_ends_quietly(run, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("minfer_lib.models.load.load_model", interrupted)
    assert run("generate", "Hello") == (130, "", "\n")


def test_a_failure_in_the_middle_is_one_sentence(lm, run, with_engine):
    with_engine([*some_pieces(lm)[:2], GenerationFailed("the model broke.")])
    code, out, err = run("generate", "Hello", *TINY)
    assert code == 2 and err.strip() == "minfer: the model broke." and out


def test_a_reader_that_goes_away_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "minfer_lib", "generate", "Hello", *TINY, "--max-tokens", "200"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    process.stdout.close()  # before the first token, as `head -c 0` would
    said = process.stderr.read().decode()
    assert process.wait() == 141 and "Traceback" not in said and "BrokenPipe" not in said


# -- chat -----------------------------------------------------------------------------------------------------------


def test_a_chat_remembers_and_forgets(lm, run, typed, with_engine):
    engine = with_engine(some_pieces(lm))
    answer = "".join(piece.text for piece in engine.pieces)
    typed("One", "", "Two", "/reset", "Three", "/what", "/exit", "Never")
    code, out, err = run("chat", *TINY, "--system", "Be brief.")
    assert code == 0 and out == (answer + "\n") * 3 and err.count("/reset forgets") == 2
    system = {"role": "system", "content": "Be brief."}
    one, two, three = ({"role": "user", "content": text} for text in ("One", "Two", "Three"))
    assert engine.prompts == [
        lm.chat_ids([system, one]),
        lm.chat_ids([system, one, {"role": "assistant", "content": answer}, two]),
        lm.chat_ids([system, three]),
    ]


def test_a_chat_ends_with_the_input(lm, run, typed):
    typed("Hello")
    code, out, _ = run("chat", *TINY, "--max-tokens", "12")
    assert code == 0 and out == expected(lm, lm.chat_ids("Hello"), max_tokens=12) + "\n" and len(out) > 5


def test_ctrl_c_stops_the_answer_and_not_the_chat(lm, run, typed, with_engine):
    pieces = some_pieces(lm)
    engine = with_engine([*pieces[:2], KeyboardInterrupt()])
    typed(KeyboardInterrupt(), "One", "Two")
    code, out, err = run("chat", *TINY)
    said = pieces[0].text + pieces[1].text
    assert code == 0 and out == (said + "\n") * 2 and err.count("(stopped)") == 2 and err.count("Ctrl-D ends") == 2
    assert {"role": "assistant", "content": said} and said in lm.decode(
        engine.prompts[1]
    )  # what was said is remembered


def test_a_message_that_fails_does_not_end_the_chat(run, typed):
    typed("x" * 5000, "Hello")
    code, out, err = run("chat", *TINY, "--max-tokens", "4")
    assert code == 0 and "Send a shorter one" in err and out.count("\n") >= 1


def test_old_turns_make_room(lm):
    turns = [{"role": role, "content": text * 60} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    turns.append({"role": "user", "content": "e" * 60})
    everything = len(lm.chat_ids(turns))
    assert fitting(lm, [], turns, everything + 10, 10) == (lm.chat_ids(turns), turns)
    system = [{"role": "system", "content": "s"}]
    prompt, kept = fitting(lm, system, turns, everything - 1, 10)
    assert kept == turns[2:] and prompt == lm.chat_ids(system + kept)
    with pytest.raises(PromptTooLong, match="Send a shorter one"):
        fitting(lm, system, turns, 60, 10)


def test_a_chat_says_what_it_forgets(lm, run, typed, with_engine):
    engine = with_engine(some_pieces(lm))
    engine.max_model_len = len(lm.chat_ids("a" * 200)) + 100
    typed("a" * 200, "b" * 200)
    code, _, err = run("chat", *TINY, "--max-tokens", "50")
    assert code == 0 and "the 2 oldest messages are forgotten" in err
    assert engine.prompts == [lm.chat_ids("a" * 200), lm.chat_ids("b" * 200)]


def test_chat_needs_a_template(lm, run, typed, monkeypatch):
    monkeypatch.setattr(type(lm.tokenizer), "chat_template", None, raising=False)
    bare = load_model("tiny-random", device="cpu")
    bare.tokenizer.chat_template = None
    monkeypatch.setattr("minfer_lib.models.load.load_model", lambda *a, **k: bare)
    code, _, err = run("chat")
    assert code == 2 and "no chat template" in err


# -- info and bench -------------------------------------------------------------------------------------------------


def test_info_shows_no_private_path(run, monkeypatch, tmp_path):
    monkeypatch.setenv("MINFER_FAST", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "models"))
    code, out, err = run("info")
    assert code == 0 and err == "" and str(tmp_path) not in out and os.path.join("~", "models") in out
    assert torch.__version__ in out and "GB/s" in out and packaged.MODEL_NAME in out


def test_home_as_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert home_as_tilde("/home/me/.cache/minfer") == "~/.cache/minfer" and home_as_tilde("/home/me") == "~"
    assert home_as_tilde("/home/mean/x") == "/home/mean/x" and home_as_tilde("/srv/models") == "/srv/models"
    monkeypatch.setenv("HOME", "/")
    assert home_as_tilde("/srv/models") == "/srv/models"


def test_ladder_is_printed_kept_and_drawn(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MINFER_FAST", "1")
    files = ["--json", str(tmp_path / "run.json"), "--svg", str(tmp_path / "new" / "run.svg")]
    size = ["--batch", "2", "--prompt-len", "8", "--output-len", "4"]
    code, out, _ = run("bench", "ladder", *TINY, "--engines", "hf, cached", *size, *files)
    assert code == 0 and "HF generate" in out and "cached" in out and "naive" not in out and "fast mode" in out
    assert (tmp_path / "new" / "run.svg").read_text().startswith("<?xml")
    code, shown, _ = run("bench", "show", str(tmp_path / "run.json"))
    assert code == 0 and shown.startswith("Recorded on ") and shown.split("\n")[1:] == out.split("\n")[1:]


# -- int8 -----------------------------------------------------------------------------------------------------------


def test_a_quantised_folder_answers_as_the_quantised_model(run, tmp_path):
    code, out, err = run("quantize", str(tmp_path / "int8"), "--model", "tiny-random")
    assert code == 0 and out == f"{tmp_path / 'int8'}\n"
    assert err.startswith("tiny-random: 14 layers in int8") and "activations 'dynamic'" in err and err.count("\n") == 1
    lm = quantize_int8(load_model("tiny-random", device="cpu"), progress=False)
    said = run("generate", "Hello", "--model", str(tmp_path / "int8"), "--device", "cpu", "--max-tokens", "12")[1]
    assert said == expected(lm, lm.chat_ids("Hello"), max_tokens=12) + "\n"
    code, out, _ = run("quantize", str(tmp_path / "int8"), "--model", "tiny-random", "--dtype", "bfloat16")
    assert code == 0 and load_model(tmp_path / "int8", device="cpu").quantization["activations"] == "dynamic"


@pytest.mark.parametrize(
    ("options", "quantization"),
    [
        (["--all", "--activations", "none"], {"activations": "none", "skip": [], "embedding": True}),
        (["--keep", "down_proj", "--keep", "layers.0"], {"skip": ["lm_head", "down_proj", "layers.0"]}),
    ],
)
def test_what_is_to_be_quantised_can_be_said(run, tmp_path, options, quantization):
    assert run("quantize", str(tmp_path / "int8"), "--model", "tiny-random", *options)[0] == 0
    made = load_model(tmp_path / "int8", device="cpu").quantization
    assert made.items() >= quantization.items()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("a file", "is a file"),
        ("a file/int8", "which is a file"),
        ("full", "holds something else"),
        ("locked/int8", "may not be written"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_before_loading(run, tmp_path, monkeypatch, name, complaint):
    def loaded(*args, **options):
        raise AssertionError("loaded in vain")

    monkeypatch.setattr("minfer_lib.models.load.load_model", loaded)
    (tmp_path / "a file").write_text("")
    (tmp_path / "locked").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    may = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: may(path, mode) and "locked" not in str(path))
    code, out, err = run("quantize", str(tmp_path / name), "--model", "tiny-random")
    assert code == 2 and out == "" and complaint in err and err.count("\n") == 1


def test_int8_on_the_command_line_needs_no_second_model(run, monkeypatch):
    def copied(*args):
        raise AssertionError("copied in vain")

    monkeypatch.setattr("minfer_lib.bench.cheaper.copied", copied)
    code, out, err = run("generate", "Hello", *TINY, "--engine", "int8", "--max-tokens", "12", "--stats")
    lm = quantize_int8(load_model("tiny-random", device="cpu"), progress=False)
    assert code == 0 and out == expected(lm, lm.chat_ids("Hello"), max_tokens=12) + "\n" and "(int8: 12 tokens" in err


def test_bitsandbytes_on_the_command_line(run):
    pytest.importorskip("bitsandbytes")
    code, out, err = run("generate", "Hello", *TINY, "--engine", "bnb-int8", "--max-tokens", "12", "--stats")
    assert code == 0 and len(out) > 5 and "(bitsandbytes int8: 12 tokens" in err


def test_quality_is_printed_kept_and_drawn(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MINFER_FAST", "1")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    files = ["--json", str(tmp_path / "quality.json"), "--svg", str(tmp_path / "quality.svg")]
    code, out, err = run("bench", "quality", *TINY, "--tokens", "64", "--window", "32", *files)
    assert code == 0 and "fast mode" in out and err.startswith("bitsandbytes int8 left out: ") and err.count("\n") == 1
    names = [line.split("  ")[0] for line in out.split("\n")[3:6]]
    assert names == ["float32", "int8 dynamic", "int8 weight-only"]
    assert (tmp_path / "quality.svg").read_text().startswith("<?xml")
    code, shown, _ = run("bench", "show", str(tmp_path / "quality.json"), "--svg", str(tmp_path / "again.svg"))
    assert code == 0 and shown.startswith("Recorded on ") and shown.split("\n")[1:] == out.split("\n")[1:]
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "quality.svg").read_bytes()


def test_quality_compares_with_bitsandbytes_where_it_is(run):
    pytest.importorskip("bitsandbytes")
    code, out, err = run("bench", "quality", *TINY, "--tokens", "32", "--window", "16")
    assert code == 0 and err == "" and "\nbitsandbytes int8 " in out


def test_quality_needs_a_text_and_a_model_as_it_was(lm, run, monkeypatch):
    def load_ids_only(*args, **options):
        return LanguageModel.of(lm.model, None, "ids only")

    def load_int8(*args, **options):
        return quantize_int8(load_model("tiny-random", device="cpu"), progress=False)

    for load, complaint in ((load_ids_only, "has no tokenizer"), (load_int8, "is quantised already")):
        with monkeypatch.context() as patch:
            patch.setattr("minfer_lib.models.load.load_model", load)
            code, out, err = run("bench", "quality", "--tokens", "32", "--window", "16")
        assert code == 2 and out == "" and complaint in err and err.count("\n") == 1


def test_tables_without_a_picture_are_shown_and_not_drawn(run, tmp_path):
    facts = {**provenance("cpu"), "model": "tiny-random"}
    Measurements({"ms": {"columns": ["bf16"], "rows": {"1 row": [2.5]}}}, facts).save(tmp_path / "t.json")
    code, out, _ = run("bench", "show", str(tmp_path / "t.json"))
    assert code == 0 and "1 row" in out and "2.50" in out
    code, out, err = run("bench", "show", str(tmp_path / "t.json"), "--svg", str(tmp_path / "t.svg"))
    assert code == 2 and out == "" and "these results are tables only" in err and err.count("\n") == 1


def test_info_lists_the_int8_kernels(run, monkeypatch, tmp_path):
    monkeypatch.setenv("MINFER_FAST", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    usable = int8_kernels.usable

    def without(name):
        return f"`{tmp_path}/cc` failed" if name == "compiled" else usable(name)

    for function in (int8_kernels.timings, usable):
        function.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(int8_kernels, "usable", without)
        out = run("info")[1]
    int8_kernels.timings.cache_clear()
    lines = {line.partition("  ")[0]: line for line in out.splitlines()}
    assert lines["int8 without compiled"].endswith("  `~/cc` failed") and "used by default: paged" in lines["engines"]
    for kind in ("int8 dynamic, float32", "int8 weight-only, bfloat16"):
        times = dict(re.findall(r"(\w+\*?) ([\d,]+)(?:,|$)", lines[kind].removeprefix(kind)))
        assert "compiled" not in str(times) and sum(name.endswith("*") for name in times) == 1
        fastest = min(times, key=lambda name: int(times[name].replace(",", "")))
        assert fastest.endswith("*") and "portable" in {name.rstrip("*") for name in times}
