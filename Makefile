# Everything runs from here, in a virtual environment of its own. `make demo` and `make test` need only Python 3.11, pip, git and make.
PYTHON ?= python3
PY := .venv/bin/python
UV := .tools/bin/uv
TORCH := torch==2.13.0+cpu

# The CPU build of torch: from the folder in PIP_FIND_LINKS if it holds one, otherwise from PyTorch's own index.
ifneq ($(wildcard $(PIP_FIND_LINKS)/torch-2.13.0+cpu-*.whl),)
TORCH_SOURCE := --no-index --find-links $(PIP_FIND_LINKS)
LOCK_SOURCE := --find-links $(PIP_FIND_LINKS) --no-emit-find-links
else
TORCH_SOURCE := --index-url https://download.pytorch.org/whl/cpu
LOCK_SOURCE := --extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match --no-emit-index-url
endif

export LC_ALL := C

.PHONY: setup demo serve test lint types imports check lock clean

setup: .venv/.ready

# --target works on system Pythons that refuse other installs (PEP 668) and on those without ensurepip.
$(UV):
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target .tools uv==0.13.9

.venv/.ready: $(UV) requirements/cpu.lock requirements/pip-check.txt
	rm -rf .venv
	$(UV) venv --quiet --python $(PYTHON) .venv
	$(UV) pip install --quiet --python $(PY) --no-deps --compile-bytecode $(TORCH_SOURCE) "$(TORCH)"
	$(UV) pip install --python $(PY) --no-deps --compile-bytecode -r requirements/cpu.lock
	$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable .
	$(PY) -m pip check 2>&1 | sort | diff - requirements/pip-check.txt
	touch $@

demo: setup
	$(PY) -m jobs.quickstart $(ARGS)

serve: setup
	$(PY) -m jobs.deploy --preset tiny --ui $(ARGS)

# Two workers: most tests keep one core busy. With a file to itself, each keeps the engines that its tests share.
test: setup
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint:
	$(PY) -m ruff check --no-cache .
	$(PY) -m ruff format --no-cache --check .

types:
	$(PY) -m pyright -p .

imports:
	.venv/bin/lint-imports

check: setup lint types imports

# Needed only when a dependency in pyproject.toml changes.
lock: $(UV)
	$(UV) pip compile --quiet pyproject.toml --extra cpu --extra dev --excludes requirements/cpu-excludes.txt \
	    $(LOCK_SOURCE) --no-annotate --no-header --python-version 3.11 -o requirements/cpu.lock

clean:
	rm -rf .venv .tools runs report
