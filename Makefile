# One verb each. `make demo` and `make test` set everything up on a fresh machine.
#   TORCH="torch==2.15.0" make test    another torch than constraints-cpu.txt names
#   make test-matrix VERSIONS="2.11.0 2.15.0"    some versions of torch
#   PYTHON=python3.12 make test        another interpreter (3.11 or newer)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
TRAINERS := $(VENV)/.trainers
ENGINES := $(addprefix $(VENV)/,vllm/.ready sglang/.ready)
CLIENTS := $(addprefix tests/,backend/test_trainers.py backend/test_torchft.py backend/test_torchtitan.py backend/test_vllm.py backend/test_sglang.py)
# Where bytecode is not kept, each process that a test starts would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
# One thread per process: the workers and the processes that they start share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=30 --durations-min=10
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
# It starts `mkdocs` of PATH, whose hooks import tools and meshplan.
MIKE := PYTHONPATH='$(CURDIR)' PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 mike
TORCHRUN := OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run

.PHONY: help setup demo test test-full test-clients soak test-dist test-matrix test-gpu check docs docs-serve
.PHONY: docs-release packages bench bench-smoke bench-gpu golden clean
.DEFAULT_GOAL := help

help: ## list the verbs
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/'

setup: $(READY) $(TOOLS) ## virtual environment with torch, meshplan and the tools

$(READY): pyproject.toml setup.py $(wildcard csrc/*) constraints-cpu.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet $(if $(TORCH),'$(TORCH)',-c constraints-cpu.txt torch)
	# Setuptools warns about --editable itself.
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --group examples --editable .
	touch $@

$(TOOLS): $(READY)
	$(BIN)/python -m pip install --quiet --group test --group dev --group docs
	touch $@

$(TRAINERS): $(TOOLS)
	$(BIN)/python -m pip install --quiet --group trainers
	$(BIN)/python -m pip install --quiet --no-deps --group without-dependencies
	touch $@

# vLLM, SGLang and the trainers need different versions of what they import. What an engine lacks is that of .venv.
$(ENGINES): $(VENV)/%/.ready: tests/backend/%.txt $(TOOLS)
	$(PYTHON) -m venv $(@D)
	$(BIN)/python -m pip --python $(@D) install --quiet --no-deps -r $<
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$(ls -d $(@D)/lib/python*/site-packages)/meshplan.pth
	touch $@

demo: $(READY) ## the main job: 40 ranks, a jagged mesh, plain DTensor and meshplan
	$(TORCHRUN) --standalone --nproc-per-node 40 examples/jagged_mesh.py

# Each test belongs to one of test, test-full, test-dist and test-gpu, by its marker.
test: setup ## tests of every part: about ten minutes on two cores
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder

test-full: setup $(TRAINERS) ## the longer tests: sanitizers, compilers, 40 ranks, faults, wheels, random cases
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder -m full
	MESHPLAN_TEST_CASES=2000 $(PYTEST) -n 2 --dist load -m soak

# A part of test-full, but for vLLM and SGLang: their packages are 300 MB or more each.
test-clients: setup $(TRAINERS) $(ENGINES) ## jobs of torchtitan, torchft, Transformers, Accelerate, Lightning, vLLM and SGLang on CPUs, at the tested versions
	$(PYTEST) -n 2 --dist load -m full $(CLIENTS)

soak: setup ## 20,000 random cases of the properties that test-full draws 2,000 of: over ten minutes
	MESHPLAN_TEST_CASES=20000 $(PYTEST) -n 2 --dist load --timeout 3600 -m soak

# Sequentially: each of these fills the machine.
test-dist: setup ## the longest tests: jobs over several hosts, broken networks, killed ranks
	$(PYTEST) -m dist

test-matrix: setup ## the seam with each version of torch; writes docs/torch-versions.md
	$(BIN)/python tools/test_matrix.py $(VERSIONS)

# Installs nothing: PYTHON needs torch and pytest.
test-gpu: ## tests that need a GPU, with the torch, pytest and compilers of this machine
	$(PYTHON) tools/build_in_place.py
	PYTHONPATH='$(CURDIR)' $(PYTHON) -m pytest -c tests/gpu.ini \
		tests/test_gpu.py tests/test_gpu_fold.py tests/test_gpu_backend.py

check: setup docs ## format, lint, types, sizes, words of the pages, links of the site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/budget.py
	$(PYTEST) -q tests/test_prose.py

docs: setup ## the site in build/site, with warnings as errors
	$(MKDOCS) build --strict --quiet

docs-release: setup ## commit the site to the branch gh-pages, as the version of pyproject.toml and as latest
	$(MIKE) deploy --update-aliases "$$($(BIN)/python -c 'import meshplan; print(meshplan.__version__)')" latest
	$(MIKE) set-default latest

docs-serve: setup ## the site at http://127.0.0.1:8000, built again after each change
	$(MKDOCS) serve --strict

packages: setup ## dist/: source, pure wheel and manylinux wheel, checked, installed and tried
	$(BIN)/python -m pip install --quiet --group packages
	$(BIN)/python tools/check_packages.py

bench: setup ## all benchmarks; writes docs/performance.md: about 20 minutes
	mkdir -p build
	$(BIN)/python -m benchmarks --json build/performance.json --page docs

bench-smoke: setup ## run the benchmarks on small cases, without times
	$(BIN)/python -m benchmarks --smoke --json $(VENV)/bench-smoke.json --page $(VENV)/bench-smoke

bench-gpu: ## the kernels for GPUs, compared with a plain copy and torch's all-reduces; what auto takes there
	$(PYTHON) tools/build_in_place.py
	$(PYTHON) -m benchmarks.allreduce_gpu

golden: setup ## write the golden file of the contract again
	$(BIN)/python tools/make_golden.py

clean: ## remove everything that setup and the tools created
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
