# make setup | make train [CONFIG=configs/small.yaml] [ARGS="--train.max_steps 50"] | make test test-slow [ARGS="-k muon"]
# make test-ecosystem: peft, trl, transformers serve, llama.cpp and lm-eval on exported models, datatrove, in a virtual
#   environment of their own; the first time it compiles llama.cpp, which takes a C++ compiler and four minutes on two cores
# make check: ruff and mypy
# make test-versions [ARGS="--only oldest"]: the quick tests with each set of versions in constraints/, on its own Python
# make test-newest: the quick tests of model, publish and train with the newest releases, and transformers' own tests
# make docs: the site of the docs, in build/site/index.html; make docs-links: the links out of it
# make image | make bench-cpu | make test-gpu bench-gpu | make bench-gpu ARGS="--only roofline"
# make wheels [WHEELS_PYTHON=3.12], then, on a machine without network that has torch: make offline bench-gpu
PYTHON ?= python3
VENV := .venv
CONFIG ?= configs/small.yaml
ARGS ?=
WHEELS_PYTHON ?= 3.12
# on every core, up to four: one process of tests needs about 2 GB
PYTEST := $(VENV)/bin/python -m pytest
PARALLEL := --numprocesses logical --maxprocesses 4 --dist worksteal

.PHONY: setup train test test-slow test-ecosystem test-versions test-newest test-gpu bench-cpu bench-gpu wheels offline check image docs docs-links

setup: $(VENV)/.ready

$(VENV)/.ready: constraints.txt setup.cfg setup.py pyproject.toml
	@echo "setting up $(VENV): downloads 0.4 GB with a PyTorch for CPUs, 2.9 GB with CUDA's, which Linux gets by default"
	@test -n "$$PIP_EXTRA_INDEX_URL$$PIP_CONSTRAINT" || command -v nvidia-smi > /dev/null || \
		echo "no NVIDIA GPU? PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup takes the one for CPUs"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# through accelerate if it was configured; else it would list its defaults, which hfgolf does not take
ACCELERATED := $(wildcard $(or $(HF_HOME),$(HOME)/.cache/huggingface)/accelerate/default_config.yaml)

train: setup
	$(VENV)/bin/$(if $(ACCELERATED),accelerate launch --quiet scripts/train.py,hfgolf train) --config $(CONFIG) $(ARGS)

test: setup
	$(PYTEST) $(PARALLEL) -m "not slow" $(ARGS)

test-slow: setup
	$(PYTEST) $(PARALLEL) -m slow $(ARGS)

test-ecosystem: .venv-ecosystem/.ready
	.venv-ecosystem/bin/python -m pytest -m ecosystem tests/ecosystem $(ARGS)

.venv-ecosystem/.ready: constraints.txt tests/ecosystem/constraints.txt setup.cfg setup.py pyproject.toml
	$(PYTHON) -m venv .venv-ecosystem
	.venv-ecosystem/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -c tests/ecosystem/constraints.txt -e ".[dev,ecosystem]"
# by itself: it needs an older python-dateutil than constraints.txt has
	.venv-ecosystem/bin/python -m pip install --quiet --disable-pip-version-check \
		-c tests/ecosystem/constraints.txt -e ".[tasks]"
	touch $@

test-versions:
	$(PYTHON) tests/versions.py $(ARGS)

test-newest:
	$(PYTHON) tests/versions.py --only newest $(PARALLEL) tests/model tests/publish tests/train $(ARGS)
	.venv-versions/newest/bin/python tests/transformers_common.py $(PARALLEL)

$(VENV)/.ready-gpu: $(VENV)/.ready
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,gpu]"
	touch $@

# only the files that have such tests: others need what a bare CUDA image lacks
test-gpu: $(VENV)/.ready-gpu
	$(PYTEST) -m gpu $$(grep -rlF mark.gpu --include="test_*.py" tests) $(ARGS)

bench-cpu: setup
	$(VENV)/bin/python benchmarks/run_all.py $(ARGS)

bench-gpu: $(VENV)/.ready-gpu
	$(VENV)/bin/python benchmarks/run_all.py --device cuda $(ARGS)

# pip runs the newest Linux builds down to glibc 2.17; --platform names each tag that a wheel may have
wheels: setup
	$(VENV)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest wheels \
		--python-version $(WHEELS_PYTHON) --implementation cp $(foreach tag,1 2010 2014 _2_17 _2_24 _2_27 _2_28 _2_31 \
		_2_34,--platform manylinux$(tag)_x86_64) -c constraints.txt -r benchmarks/wheels.txt
	du -sh wheels

# a virtual environment that sees what PYTHON has installed, also if PYTHON is in one itself
offline:
	$(PYTHON) -m venv --clear --without-pip $(VENV)
	$(PYTHON) -c "import site; print('import site;', *(f'site.addsitedir({path!r});' for path in site.getsitepackages()))" \
		> "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outside.pth"
	$(PYTHON) -m pip --python $(VENV)/bin/python install --quiet --no-index --no-deps --find-links wheels \
		-r benchmarks/wheels.txt
	touch $(VENV)/.ready $(VENV)/.ready-gpu

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

image:
	docker build --build-arg COMMIT=$$(git describe --always --dirty --abbrev=40 --exclude='*') -t hfgolf .

# a link that leads nowhere, or to no heading, fails the build
docs: .venv-docs/.ready
	rm -rf build/docs
	mkdir -p build/docs
	cp -r --parents *.md LICENSE docs configs examples lessons benchmarks/*.md benchmarks/experiments/README.md \
		benchmarks/experiments/results/*.* build/docs
	.venv-docs/bin/zensical build --clean --strict
	@echo "open build/site/index.html"

docs-links:
	@grep -rhoE --include='*.md' "https?://[^][ )>\"'\`]+" *.md docs benchmarks | sort -u

.venv-docs/.ready: docs/site/constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c $< zensical
	touch $@
