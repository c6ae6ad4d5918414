# Everything a checkout needs: python3 (3.11 or later), make and a package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SWEEP := $(BIN)/commsweep

# Container images often set this. Without bytecode every worker compiles torch anew: 20 s instead of 8.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-text demo-gradients demo-links demo-kfac demo-local demo-sparse demo-finetune gpu test test-slow docs notebooks lock clean

demo: $(VENV)/ready
	$(SWEEP) sweep launch demo
	$(SWEEP) report demo --out out/demo

demo-text: $(VENV)/ready
	$(SWEEP) sweep launch demo-text
	$(SWEEP) report demo-text --out out/demo-text

demo-gradients: $(VENV)/ready
	$(SWEEP) sweep launch demo-gradients
	$(SWEEP) report demo-gradients --out out/demo-gradients

# Needs Linux, root and iproute2: the stages run in network namespaces.
demo-links: $(VENV)/ready
	$(SWEEP) links demo-links --out out/demo-links
	$(SWEEP) advise digits --bandwidth 20Mbit --latency 5ms

# As demo-links: its measurements run in network namespaces.
demo-kfac: $(VENV)/ready
	$(SWEEP) sweep launch demo-kfac
	$(SWEEP) links demo-kfac --out out/demo-kfac

demo-local: $(VENV)/ready
	$(SWEEP) sweep launch demo-local
	$(SWEEP) report demo-local --out out/demo-local

demo-sparse: $(VENV)/ready
	$(SWEEP) sweep launch demo-sparse
	$(SWEEP) report demo-sparse --out out/demo-sparse

demo-finetune: $(VENV)/ready
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r requirements-finetune.txt
	$(SWEEP) sweep launch finetune --workers 1
	$(SWEEP) report finetune --out out/finetune

# On a lent GPU: the hook over gloo and NCCL, then the queue of trainings, four at once. It goes on from rows that are
# committed and from what the store holds; make gpu QUEUE=smoke-gpu PER_GPU=1 tries it on a CPU. The store comes back
# without checkpoints, some kilobytes a training.
QUEUE := gpu_queue
PER_GPU := 4
GPU_SECONDS := 540
DATA := data
BACK := out/gpu
STORE := store
gpu: $(VENV)/ready
	mkdir -p $(BACK)
	-$(BIN)/python -m pytest -q -n 0 tests/data_parallel/test_hook.py -k on_a_gpu
	test ! -f docs/results/$(QUEUE)/rows.csv || $(SWEEP) sweep adopt $(QUEUE) docs/results/$(QUEUE)/rows.csv --store $(STORE)
	timeout --signal INT $(GPU_SECONDS) $(SWEEP) sweep launch $(QUEUE) --per-gpu $(PER_GPU) --store $(STORE) \
		$(if $(wildcard $(DATA)),--data-root $(DATA)) || [ $$? -eq 124 ]
	$(SWEEP) report $(QUEUE) --store $(STORE) --out $(BACK)/report
	tar --exclude='*.ckpt' --exclude='*.pt' -czf $(BACK)/store.tar.gz -C $(STORE) .

test: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/basedpyright
	$(BIN)/python -m pytest

# About 100 minutes on one core. Longest: feedback 17, processes 13, launching 12, data_parallel 12, reporting 11,
# cli 10 minutes; a part alone: make test-slow PART=tests/processes
PART := tests
test-slow: $(VENV)/ready
	@echo "the slow tests of all parts take about 100 minutes of one core"
	$(BIN)/python -m pytest -m slow -n 0 $(PART)

$(VENV)/ready: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "commsweep needs Python 3.11 or later; set PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

# The pages of docs/reference that follow from the code, then all pages as a site (site/index.html).
docs: $(VENV)/ready
	$(BIN)/python -m docs.tools.reference
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements-docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# The notebooks with what they show of the rows in docs/results.
notebooks: $(VENV)/ready
	$(BIN)/jupyter-execute --inplace --NotebookClient.record_timing=False notebooks/*.ipynb

# Names and versions only: an address in the lock would bind it to one registry.
lock:
	$(BIN)/uv pip compile --universal --python-version 3.11 --extra test --upgrade --quiet --no-header --no-annotate \
		--no-emit-index-url --no-emit-find-links pyproject.toml -o requirements.lock

clean:
	rm -rf $(VENV) out site .pytest_cache .ruff_cache *.egg-info
