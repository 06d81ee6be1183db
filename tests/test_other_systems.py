"""What a learner's way through the package needs of the operating system: nothing that only Linux has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import minfer_lib

ROOT = Path(minfer_lib.__file__).parents[1]
# What Windows does not have, taken away once the libraries underneath are loaded, which know it by themselves.
LIKE_WINDOWS = """
import os, pkgutil, signal, sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import accelerate, IPython, matplotlib.pyplot, nbclient, pandas, psutil, torch, torch.profiler, transformers
import ipykernel.kernelapp, ipywidgets, jupyter_client.manager
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, GgufConfig

if find_spec("triton"):
    import triton

for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None  # importing it is an ImportError from now on
for name in ("fork", "getuid", "getgid", "sched_getaffinity", "sysconf", "getloadavg", "O_CLOEXEC", "RTLD_NOW"):
    delattr(os, name) if hasattr(os, name) else None
for name in ("SIGALRM", "SIGKILL", "SIGHUP", "alarm", "setitimer"):
    delattr(signal, name) if hasattr(signal, name) else None
read_text = Path.read_text


def without_proc(path, *args, **kwargs):
    if path.as_posix().startswith(("/proc", "/sys")):
        raise FileNotFoundError(path)
    return read_text(path, *args, **kwargs)


Path.read_text = without_proc
os.environ["PATH"] = ""  # no cc, no git, no sysctl

import minfer_lib

for module in pkgutil.walk_packages(minfer_lib.__path__, "minfer_lib."):
    # What needs a GPU on Linux, or a library that is asked for apart.
    optional = ("minfer_lib.kernels.triton.", "minfer_lib.bench.lm_harness", "minfer_lib.bench.peers.")
    if not module.name.startswith(optional) and not module.name.endswith("__main__"):
        import_module(module.name)
"""


def run(code: str, **variables: str) -> str:
    """What a fresh Python prints for `code`, without the variables of OpenMP that this process may have."""
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | variables
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_way_of_a_learner_needs_no_unix(tmp_path: Path) -> None:
    """Every module is imported, an engine of each kind answers, a result is drawn, saved, read and shown."""
    code = LIKE_WINDOWS + (
        "from minfer_lib import CachedEngine, LLMEngine, NaiveEngine, SamplingParams, load_model, quantize_int8\n"
        "from minfer_lib.bench import compare, fixed_lengths, load_recorded\n"
        "from minfer_lib.__main__ import main\n"
        "lm = load_model('tiny-random', device='cpu')\n"
        "params = SamplingParams(max_tokens=4, ignore_eos=True)\n"
        "for make in (NaiveEngine, CachedEngine, LLMEngine, lambda lm: LLMEngine(lm, kv_cache='paged')):\n"
        "    assert len(make(lm).generate('Hello', params)[0].token_ids) == 4\n"
        "quantize_int8(lm, progress=False)\n"
        "assert len(LLMEngine(lm).generate('Hello', params)[0].token_ids) == 4\n"
        "found = compare(CachedEngine(lm), workload=fixed_lengths(lm, 2, 8, 4), repeats=1, show=False)\n"
        f"found.save(r'{tmp_path}/run.json')\n"
        "found.plot()\n"
        "assert 'cached' in str(found) and '<table' in found._repr_html_()\n"
        "assert load_recorded('cpu_arrivals').rows\n"
        "assert main(['info']) == 0\n"
    )
    out = run(code, MINFER_CACHE=str(tmp_path / "cache"), MINFER_FAST="1", MPLBACKEND="agg")
    assert "no C compiler `cc` on this machine" in out and "paged" in out


@pytest.mark.parametrize(
    ("variables", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_threads_do_not_spin_for_long_unless_somebody_said_how_to_wait(variables: dict[str, str], spins: str) -> None:
    code = "import os, sys, minfer_lib\nprint(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    assert run(code, **variables).split() == [spins, "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="GCC's OpenMP is that of torch for Linux")
def test_the_openmp_of_torch_reads_it() -> None:
    code = "import os, sys, minfer_lib\nos.dup2(1, 2)\nimport torch"  # it says its settings on standard error
    assert "GOMP_SPINCOUNT = '1000'" in run(code, OMP_DISPLAY_ENV="VERBOSE")
