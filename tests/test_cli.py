"""The command line: answers on standard output, everything else on standard error, one sentence for each mistake."""

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest
import torch

from minfer_lib import CachedEngine, quantize_int8
from minfer_lib import __main__ as cli
from minfer_lib.bench import provenance
from minfer_lib.bench.results import Cells, Result
from minfer_lib.bench.rungs import RUNGS, make_engine
from minfer_lib.errors import GenerationFailed, MinferError, PromptTooLong
from minfer_lib.generation.options import SAMPLING, in_options, option
from minfer_lib.generation.params import SamplingParams
from minfer_lib.models import host, packaged
from minfer_lib.models.load import LanguageModel, load_model
from minfer_lib.quant import products

ROOT = Path(__file__).resolve().parents[1]
TINY = ("--model", "tiny-random", "--device", "cpu")


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


@pytest.mark.parametrize("engine", [name for name in cli.ENGINES if "int8" not in name])
def test_every_engine_says_the_same(lm, run, engine):
    code, out, _ = run("generate", "Hello", *TINY, "--engine", engine, "--max-tokens", "12")
    assert code == 0 and out == expected(lm, lm.chat_ids("Hello"), max_tokens=12) + "\n" and len(out) > 5


@pytest.mark.parametrize("name", [rung.name for rung in RUNGS if not rung.weights])
def test_every_rung_says_the_same(lm, name):
    ids = lm.chat_ids("Hello")
    assert make_engine(name, lm).generate(ids, SamplingParams(max_tokens=12))[0].text == expected(
        lm, ids, max_tokens=12
    )


@pytest.mark.parametrize("engine", [name for name in cli.ENGINES if "int8" in name])
def test_every_engine_runs_over_int8(run, engine):
    code, out, err = run("generate", "Hello", *TINY, "--engine", engine, "--max-tokens", "12", "--stats")
    lm = quantize_int8(load_model("tiny-random", device="cpu"), progress=False)
    same = make_engine("slots" if engine == "int8" else engine.removesuffix("-int8"), lm)
    said = same.generate(lm.chat_ids("Hello"), SamplingParams(max_tokens=12))[0].text
    assert code == 0 and out == said + "\n" and len(out) > 5 and f"({engine}: 12 tokens" in err


def test_sampling_options_arrive(lm, run):
    options = ["--max-tokens", "10", "--temperature", "0.9", "--top-k", "20", "--top-p", "0.8", "--min-p", "0.01"]
    out = run("generate", "Hello", *TINY, *options, "--seed", "5", "--repetition-penalty", "1.2")[1]
    params = dict(max_tokens=10, temperature=0.9, top_k=20, top_p=0.8, min_p=0.01, seed=5, repetition_penalty=1.2)
    assert out == expected(lm, lm.chat_ids("Hello"), **params) + "\n"
    assert out != run("generate", "Hello", *TINY, *options, "--seed", "6", "--repetition-penalty", "1.2")[1]


def test_every_field_of_sampling_params_is_an_option():
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    del fields["logits_processors"]  # functions cannot be typed
    assert SAMPLING.keys() == fields.keys()
    for name, default in fields.items():
        told = re.search(r"\(default:? ?([\d.]+)|([\d.]+) \(default\)", SAMPLING[name]["help"])
        if name != "max_tokens" and isinstance(default, int | float) and not isinstance(default, bool):
            assert float(told[1] or told[2]) == default, name
        else:
            assert told is None or name == "max_tokens"


def test_every_option_arrives_in_sampling_params(run, monkeypatch):
    values = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25,
        "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.75, "logit_bias": {5: -1.5, 7: 2.0},
        "stop": ("one", "two"), "stop_token_ids": (8, 9), "ignore_eos": True, "seed": 3, "logprobs": 2, "n": 2,
    }  # fmt: skip
    arguments = []
    for name, value in values.items():
        if name == "logit_bias":
            texts = [f"{i}={bias}" for i, bias in value.items()]
        else:
            texts = map(str, value if isinstance(value, tuple) else [value])
        arguments += [option(name)] if value is True else [part for text in texts for part in (option(name), text)]
    given = []
    monkeypatch.setattr(cli, "load", lambda args: given.append(cli.sampling(args)) or sys.exit(0))
    with pytest.raises(SystemExit):
        run("generate", "x", "--json", *TINY, *arguments)
    with pytest.raises(SystemExit):
        run("generate", "x", *TINY)
    assert {name: getattr(given[0], name) for name in values} == values
    assert given[1] == SamplingParams(max_tokens=256)


def test_several_answers_come_one_after_the_other(lm, run):
    options = ["--max-tokens", "6", "--temperature", "1", "--seed", "3", "--n", "2"]
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=2)
    outputs = make_engine("paged", lm).generate(lm.chat_ids("Hello"), params)
    for engine in ("paged", "cached"):
        code, out, err = run("generate", "Hello", *TINY, *options, "--engine", engine)
        assert code == 0 and out == "".join(output.text + "\n" for output in outputs)
        assert [line for line in err.splitlines() if "answer" in line] == ["(answer 1 of 2)", "(answer 2 of 2)"]
    out = run("generate", "Hello", *TINY, *options, "--json", "--logprobs", "1")[1]
    records = [json.loads(line) for line in out.splitlines()]
    assert [(r["index"], r["token_ids"]) for r in records] == [(o.index, o.token_ids) for o in outputs]
    assert all(str(i) in at for r in records for i, at in zip(r["token_ids"], r["logprobs"], strict=True))


def test_a_banned_token_is_valid_json(run):
    options = ["--json", "--logprobs", "300", "--max-tokens", "1", "--logit-bias", "5=-inf"]
    record = json.loads(run("generate", "Hello", *TINY, *options)[1], parse_constant=pytest.fail)
    assert len(record["logprobs"][0]) > 250


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
    assert code == 0 and "(paged: 6 tokens, the first after" in err and "tokens" not in out
    assert "(paged: 1 token, the first after" in run("generate", "Hello", *TINY, "--max-tokens", "1", "--stats")[2]


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
        (["generate", "x", *TINY, "--temperature", "-1"], "--temperature"),
        (["generate", "x", *TINY, "--max-tokens", "0"], "--max-tokens"),
        (["generate", "x", *TINY, "--top-p", "2"], "--top-p"),
        (["generate", "x", *TINY, "--min-tokens", "9", "--max-tokens", "8"], "--max-tokens, which is 8"),
        (["generate", "x", *TINY, "--logprobs", "2"], "--logprobs was given"),
        (["generate", "x", *TINY, "--logit-bias", "99999=1"], "--logit-bias"),
        (["generate", "x\udcff", *TINY], "cannot be read as"),
        (["chat", *TINY, "--stop", "x\udcff"], "cannot be read as"),
        (["generate", "x", *TINY, "--dtype", "float8"], "dtype"),
        (["generate", "", *TINY, "--raw"], "no tokens"),
        (["generate", "x" * 3000, *TINY, "--raw"], "leaves no room"),
        (["generate", "x", "--model", "README.md"], "is a file"),
        (["generate", "x", *TINY, "--raw", "--system", "Be brief."], "--raw and --system"),
        (["bench", "ladder", *TINY, "--engines", "warp"], "'warp'"),
        (["bench", "ladder", *TINY, "--batch", "0"], "start at 1"),
        (["bench", "ladder", *TINY, "--repeats", "0"], "--repeats must be an integer of 1 or more"),
        (["bench", "show", "no-such-file.json"], "no-such-file.json"),
        (["bench", "quality", *TINY, "--tokens", "1"], "--tokens"),
        (["bench", "quality", *TINY, "--window", "9999"], "--window"),
        (["quantize", "int8-model", "--model", "tiny-random", "--keep", "no_such_proj"], "'no_such_proj' names no"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(run, arguments, complaint):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and err.startswith("minfer: ") and complaint in err
    assert err.count("\n") == 1 and "Traceback" not in err


def test_messages_are_in_the_words_of_the_command_line():
    args = argparse.Namespace(repeats=3, run=None)
    assert in_options("top_p must be over 0; it is 2.0.", args) == "--top-p must be over 0; it is 2.0."
    assert in_options("n must be 1.", args) == "--n must be 1."
    assert in_options("repeats=0 is not possible.", args) == "--repeats=0 is not possible."
    assert in_options("min_tokens must be at most max_tokens.", args) == "--min-tokens must be at most --max-tokens."
    for text in ("A stop, a seed or n of them.", "max_model_len must be 8.", "top_percent must be 8."):
        assert in_options(text, args) == text


@pytest.mark.parametrize(("arguments", "code"), [(["generate", b"\xc3\xb6"], 2), (["generate", "-"], 2), (["chat"], 0)])
def test_bytes_that_are_no_text_are_refused_wherever_they_come_from(arguments, code):
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "minfer_lib", *arguments, *TINY]
    done = subprocess.run(command, input=b"a\xff\n", capture_output=True, timeout=60, env=environment)
    said = done.stderr.decode().splitlines()
    assert done.returncode == code and done.stdout == b"", done
    assert said[-1].startswith("minfer: A text was given that cannot be read as ascii"), said


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
    assert exit.value.code == 2 and "usage: minfer" in capsys.readouterr().err


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
def with_engine(lm, monkeypatch):
    def use(pieces):
        engine = Streaming(pieces)
        monkeypatch.setattr(cli, "load", lambda args: (lm, engine))
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
    assert cli.fitting(lm, [], turns, everything + 10, 10) == (lm.chat_ids(turns), turns)
    system = [{"role": "system", "content": "s"}]
    prompt, kept = cli.fitting(lm, system, turns, everything - 1, 10)
    assert kept == turns[2:] and prompt == lm.chat_ids(system + kept)
    with pytest.raises(PromptTooLong, match="Send a shorter one"):
        cli.fitting(lm, system, turns, 60, 10)


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
    assert host.home_as_tilde("/home/me/.cache/minfer") == "~/.cache/minfer" and host.home_as_tilde("/home/me") == "~"
    assert host.home_as_tilde("/home/mean/x") == "/home/mean/x" and host.home_as_tilde("/srv/models") == "/srv/models"
    monkeypatch.setenv("HOME", "/")
    assert host.home_as_tilde("/srv/models") == "/srv/models"


@pytest.mark.parametrize(
    ("files", "quota", "memory"),
    [
        ({}, None, None),
        ({"cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "max 100000", "/sys/fs/cgroup/memory.max": "max"}, None, None),
        ({"cgroup": "0::/docker/x", "/sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0, None),  # the path is the host's
        (
            {
                "cgroup": "0::/a/b",
                "/sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "/sys/fs/cgroup/a/cpu.max": "150000 100000",
                "/sys/fs/cgroup/a/b/memory.max": "3000",
                "/sys/fs/cgroup/a/memory.max": "2000",
            },
            1.5,
            2000,
        ),
        (
            {
                "cgroup": "9:memory:/\n4:cpu,cpuacct:/x\n0::/",
                "/sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            0.5,
            None,
        ),
    ],
)
def test_the_limits_of_a_container(monkeypatch, files, quota, memory):
    files = {("/proc/self/cgroup" if name == "cgroup" else name): text for name, text in files.items()}
    monkeypatch.setattr(host, "_read", lambda path: files.get(path.as_posix(), ""))
    assert host.cpu_quota() == quota and host.memory_limit() == memory


@pytest.mark.parametrize(
    ("threads", "cpus", "quota", "text"),
    [
        (8, 8, None, "8, on 8 CPUs"),
        (1, 1, None, "1, on 1 CPU"),
        (2, 8, 2.0, "2, on 8 CPUs of which a container grants the time of 2"),
        (9, 8, None, "9, on 8 CPUs; WARNING: they wait for each other, set OMP_NUM_THREADS=8"),
        (8, 8, 1.5, "8, on 8 CPUs of which a container grants the time of 1.5; WARNING: they wait for each other, "
                    "set OMP_NUM_THREADS=2"),
    ],
)  # fmt: skip
def test_more_threads_than_cpus_are_warned_of(monkeypatch, threads, cpus, quota, text):
    monkeypatch.setattr(host, "cpus_allowed", lambda: cpus)
    monkeypatch.setattr(host, "cpu_quota", lambda: quota)
    assert host.describe_threads(threads) == text


def test_the_instruction_sets_of_a_cpu(monkeypatch):
    monkeypatch.setattr(host, "_read", lambda path: "model name\t: A CPU\nflags\t\t: fpu avx2 avx512_vnni avx2x")
    assert host.instruction_sets() == ["avx2", "avx512_vnni"]
    monkeypatch.setattr(host, "_read", lambda path: "Features\t: fp asimd i8mm")  # ARM
    assert host.instruction_sets() == ["asimd", "i8mm"]


def test_a_copy_without_bench_and_learn_answers(tmp_path):
    shutil.copytree(ROOT / "minfer_lib", tmp_path / "minfer_lib", ignore=shutil.ignore_patterns("bench", "learn"))
    code = f"""
import sys
# the finder of an editable installation would find what is missing in the clone
sys.meta_path = [finder for finder in sys.meta_path if not finder.__module__.startswith("__editable__")]
sys.path.insert(0, {str(tmp_path)!r})
from minfer_lib.__main__ import main
tiny = {list(TINY)!r}
for command in (["generate", "Hello", *tiny, "--max-tokens", "2"], ["chat", *tiny, "--max-tokens", "2"],
                ["quantize", {str(tmp_path / "int8")!r}, "--model", "tiny-random"], ["info"],
                ["generate", "Hello", "--model", {str(tmp_path / "int8")!r}, "--max-tokens", "2"],
                ["bench", "ladder", *tiny]):
    print(main(command), command[0], file=sys.stderr)
print([name for name in sys.modules if name.startswith(("minfer_lib.bench", "minfer_lib.learn"))])
"""
    done = subprocess.run([sys.executable, "-c", code], input="Hello\n", capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if re.match(r"\d \w+$", line)]
    assert said == ["0 generate", "0 chat", "0 quantize", "0 info", "0 generate", "2 bench"], done.stderr
    assert "minfer: This copy of minfer_lib has no folder bench/" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout.endswith("\n[]\n") and "paged" in done.stdout


def test_the_version_and_the_command(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    versions = [f"{name} {version(name)}" for name in ("minfer", "torch", "transformers")]
    assert exit.value.code == 0 and capsys.readouterr().out == ", ".join(versions) + "\n"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert EntryPoint("minfer", scripts["minfer"], "console_scripts").load() is cli.main


def test_a_warning_is_one_line(lm, run, monkeypatch):
    def warn(args):
        warnings.warn("the cache was cut.", stacklevel=1)
        raise MinferError("Done.")

    monkeypatch.setattr(cli, "load", warn)
    assert run("generate", "x", *TINY) == (2, "", "warning: the cache was cut.\nminfer: Done.\n")


def test_ladder_is_printed_kept_and_drawn(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MINFER_FAST", "1")
    files = ["--json", str(tmp_path / "run.json"), "--svg", str(tmp_path / "new" / "run.svg")]
    size = ["--batch", "2", "--prompt-len", "8", "--output-len", "4"]
    code, out, _ = run("bench", "ladder", *TINY, "--engines", "hf, cached", *size, *files)
    assert code == 0 and "HF generate" in out and "cached" in out and "naive" not in out and "fast mode" in out
    assert (tmp_path / "new" / "run.svg").read_text().startswith("<?xml")
    code, shown, _ = run("bench", "show", str(tmp_path / "run.json"))
    assert code == 0 and shown.startswith("Recorded on ") and shown.split("\n")[1:] == out.split("\n")[1:]


def interrupted_at(monkeypatch, call):
    """Lets the n-th call of `CachedEngine.generate` be interrupted."""
    generate, calls = CachedEngine.generate, iter(range(1, 99))

    def interrupted(self, *args, **options):
        if next(calls) == call:
            raise KeyboardInterrupt
        return generate(self, *args, **options)

    monkeypatch.setattr(CachedEngine, "generate", interrupted)


def test_an_interrupted_ladder_keeps_what_was_measured(run, tmp_path, monkeypatch):
    options = ["--engines", "naive,cached", "--batch", "1", "--prompt-len", "4", "--output-len", "2"]
    options += ["--json", str(tmp_path / "run.json")]
    interrupted_at(monkeypatch, 2)  # warmed up, and then in its first run
    code, out, err = run("bench", "ladder", *TINY, *options)
    assert code == 130 and "\nnaive " in out and "interrupted; not measured: cached" in out and err == ""
    shown = run("bench", "show", str(tmp_path / "run.json"))[1]
    assert shown.split("\n")[1:] == out.split("\n")[1:]
    interrupted_at(monkeypatch, 1)  # nothing was measured
    (tmp_path / "run.json").unlink()
    assert run("bench", "ladder", *TINY, *options) == (130, "", "\n") and not (tmp_path / "run.json").exists()


# -- int8 -----------------------------------------------------------------------------------------------------------


def test_a_quantised_folder_answers_as_the_quantised_model(run, tmp_path):
    code, out, err = run("quantize", str(tmp_path / "int8"), "--model", "tiny-random")
    assert code == 0 and out == f"{tmp_path / 'int8'}\n"
    assert err.startswith("tiny-random: 14 layers in int8") and "activations 'dynamic'" in err and err.count("\n") == 1
    lm = quantize_int8(load_model("tiny-random", device="cpu"), progress=False)
    said = run("generate", "Hello", "--model", str(tmp_path / "int8"), "--device", "cpu", "--max-tokens", "12")[1]
    assert said == expected(lm, lm.chat_ids("Hello"), max_tokens=12) + "\n"
    again = run("generate", "Hello", "--model", str(tmp_path / "int8"), "--device", "cpu", "--max-tokens", "12",
                "--engine", "int8")[1]  # fmt: skip
    assert again == said  # what is in int8 already runs as it is
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
    Result("table", [Cells("ms", "1 row", {"bf16": 2.5})], {}, facts).save(tmp_path / "t.json")
    code, out, _ = run("bench", "show", str(tmp_path / "t.json"))
    assert code == 0 and "1 row" in out and "2.50" in out
    code, out, err = run("bench", "show", str(tmp_path / "t.json"), "--svg", str(tmp_path / "t.svg"))
    assert code == 2 and out == "" and "they have none" in err and err.count("\n") == 1


def test_info_says_why_a_product_cannot_be_used(run, monkeypatch, tmp_path):
    monkeypatch.setenv("MINFER_FAST", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    why_not = products.why_not
    monkeypatch.setattr(
        products, "why_not", lambda name: f"`{tmp_path}/cc` failed" if name == "compiled" else why_not(name)
    )
    products.choose.cache_clear()
    out = run("info")[1]
    products.choose.cache_clear()
    lines = {line.partition("  ")[0]: line for line in out.splitlines()}
    assert lines["int8 without compiled"].endswith("  `~/cc` failed") and "used by default: paged" in lines["engines"]
    assert "compiled" not in lines["int8"] and "portable" in lines["int8"]
