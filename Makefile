# One virtual environment for all; the versions are those that were tested.
PYTHON ?= python3.11
VENV ?= .venv
EVALUATION_VENV ?= .venv-evaluation
VLLM_VENV ?= .venv-vllm
GGUF_VENV ?= .venv-gguf
BIN = $(VENV)/bin
# OpenMP's threads would spin while they wait, and slow training down beside any other process.
export OMP_WAIT_POLICY ?= passive
# Otherwise Python would compile each module in every process, since pip compiles none.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install quickstart emoji test test-slow quality docs

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/installed ## the tested versions of all packages, into .venv

# What the quickstart and the README's commands need. torch on its own first: where a local build is at hand, the pin
# finds it before anything else asks for torch. pip would take longer to compile all modules than to install them, so
# Python compiles those that are imported.
PIP_INSTALL = $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
$(VENV)/installed-to-use: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable ".[release]"
	touch $@

$(VENV)/installed: $(VENV)/installed-to-use
	$(PIP_INSTALL) --editable ".[dev,examples]"
	touch $@

# For `normllava evaluate`. lmms-eval asks for torchvision and does without it too; PyPI's is built for CUDA, and
# beside a CPU build of torch transformers can't be imported with it.
$(EVALUATION_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(EVALUATION_VENV)
	$(EVALUATION_VENV)/bin/pip install --quiet --constraint constraints.txt torch
	$(EVALUATION_VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[evaluate]"
	if $(EVALUATION_VENV)/bin/python -c "import torch; assert torch.version.cuda is None" 2>/dev/null; then \
		$(EVALUATION_VENV)/bin/pip uninstall --quiet --yes torchvision; fi
	touch $@

# For `python -m hub_cards gguf`. llama.cpp's converter brings a module gguf that is newer than the package gguf.
$(GGUF_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(GGUF_VENV)
	$(GGUF_VENV)/bin/pip install --quiet --constraint constraints.txt torch
	$(GGUF_VENV)/bin/pip install --quiet --constraint constraints.txt --editable ".[gguf]"
	touch $@

# For one slow test: vLLM pins torch and caps transformers. Its `torch==...+cpu` is not on PyPI: where no local build is
# at hand, name the index of PyTorch's CPU builds in PIP_EXTRA_INDEX_URL. PyPI's torchaudio
# and torchcodec need CUDA's torch. vLLM's Llava imports torchvision, which can do without its compiled operators.
$(VLLM_VENV)/installed: tests/hub_cards/vllm_requirements.txt
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --requirement $<
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchaudio torchcodec
	sed -i '/^    _meta_registrations,$$/d' $(VLLM_VENV)/lib/python3.11/site-packages/torchvision/__init__.py
	touch $@

quickstart: $(VENV)/installed-to-use ## a small model from nothing, and its report: 4 to 7 minutes after the install
	$(BIN)/python -m examples.digits.quickstart

# A real model from pretrained parts; stop it and go on as you like.
emoji: install ## a model of 135M that names drawings: about an hour
	$(BIN)/python -m examples.emoji.run

# Two processes; tests of one `xdist_group` share one. Small models: threads that wait for each other take longer than
# one that works.
test: install ## the fast tests
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadgroup

test-slow: install ## the slow tests: over an hour
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m slow

quality: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install ## the pages, into runs/site
	$(BIN)/python docs/reference.py
	$(BIN)/mkdocs build --strict
