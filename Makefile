# "make help" lists the commands. Everything is installed into .venv; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CORPUS := examples/data/sample.jsonl
SAMPLE := runs/sample
RUN := runs/tiny_llama
RECIPE := examples/configs/tiny_llama.yaml
ARGS :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install pretrain test test-matrix lint typecheck clean distclean again

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(VENV)/.installed ## set up .venv, build the C++ extension

# The stamp is written last and holds the folder's path: with another path in it, the checkout was moved, and only the
# editable install must be repeated. A .venv marked unfinished is what an interrupted install left and is made afresh, as
# is one whose Python is gone; one that somebody made by hand is used as it is.
# torch comes before megalite, in the range that is tested: setup.py alone would let pip take any newer torch. A build
# of torch chosen otherwise (CPU only, another CUDA, ROCm) satisfies the range and stays.
# --no-build-isolation: the build needs no network once these packages are there.
PYTHON_IS_NEW := import sys; sys.version_info >= (3, 10) or sys.exit('megalite needs Python 3.10 or later: PYTHON=...')
STAMP := $(shell { $(PY) -c "" && cat $(VENV)/.installed; } 2>/dev/null)
INSTALLED_HERE := $(and $(filter $(CURDIR),$(STAMP)),$(wildcard megalite/_C.*))
$(VENV)/.installed: setup.py pyproject.toml $(wildcard csrc/*) $(if $(INSTALLED_HERE),,again)
	@test ! -e $(VENV)/.unfinished && $(PY) -c "" 2>/dev/null || { echo "making $(VENV) with $(PYTHON)"; \
		$(PYTHON) -c "$(PYTHON_IS_NEW)" && rm -rf $(VENV) && mkdir $(VENV) && touch $(VENV)/.unfinished && \
		$(PYTHON) -m venv $(VENV); }
	$(PY) -m pip install "setuptools>=77" wheel "pybind11>=2.13" "torch>=2.11,<2.14"
	$(PY) -m pip install --no-build-isolation -e ".[test,data]"
	@rm -f $(VENV)/.unfinished; echo "$(CURDIR)" > $@

# The sample: a corpus with its tokenizer, then the binary dataset; each is made once, and again when its
# tool or what it is made of changes.
$(SAMPLE)/tokenizer.json: tools/prepare_sample.py $(CORPUS) | $(VENV)/.installed
	$(PY) tools/prepare_sample.py --output $(SAMPLE)
	@touch $@

$(SAMPLE)/corpus_text_document.idx: $(SAMPLE)/tokenizer.json tools/preprocess_data.py
	$(PY) tools/preprocess_data.py --input $(SAMPLE)/corpus.jsonl --output-prefix $(SAMPLE)/corpus --append-eod \
		--tokenizer-type HuggingFaceTokenizer --tokenizer-model $(SAMPLE)/tokenizer.json --workers 2

# A run is continued only if it was made by this recipe on this data; any other is kept under another name.
KEY = $$(cat $(RECIPE) $(SAMPLE)/tokenizer.json $(SAMPLE)/corpus_text_document.idx | cksum)
pretrain: $(VENV)/.installed $(SAMPLE)/corpus_text_document.idx ## train a small GPT on the sample corpus and let it write
	@mkdir -p runs; if [ -e $(RUN) ] && [ "$$(cat $(RUN)/recipe.cksum 2>/dev/null)" != "$(KEY)" ]; then \
		old=$(RUN).$$(date +%Y%m%d-%H%M%S); mv $(RUN) $$old; \
		echo "The recipe or the data changed since the last run: starting anew, the last run is kept in $$old"; fi
	@mkdir -p $(RUN); echo "$(KEY)" > $(RUN)/recipe.cksum
	bash examples/pretrain_gpt.sh --save $(RUN) --load $(RUN) --save-interval 100 --metrics-file $(RUN)/metrics.jsonl
	@echo "for comparison, the unigram entropy of the corpus in nats a token:" \
		"$$($(PY) tools/prepare_sample.py --entropy $(SAMPLE)/corpus_text_document)"
	$(PY) tools/generate.py --load $(RUN) --prompt "It was a"

# Two files at a time, each with workers of its own; ARGS="-n 0" is one process, for a debugger.
test: $(VENV)/.installed ## the whole test suite; ARGS="tests/data -x" are pytest's
	$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

# Rounds through all layouts, models and schedules with the other options drawn; another seed draws others.
test-matrix: $(VENV)/.installed ## the fp64 matrix at large; ARGS="--matrix-rounds 3 --matrix-seed 7" are pytest's
	$(PY) -m pytest tests/matrix --matrix-rounds 1 $(ARGS)

lint: $(VENV)/.installed ## ruff
	$(PY) -m ruff check . examples/pretrain_gpt.sh

# mypy knows nothing of editable installs, so the package is laid out as it is installed: megalite with its kernels.
typecheck: $(VENV)/.installed ## mypy
	@rm -rf build/types && mkdir -p build/types/megalite
	@ln -s "$(CURDIR)"/megalite/* "$(CURDIR)"/kernels build/types/megalite/
	MYPYPATH=build/types $(PY) -m mypy -p megalite
	MYPYPATH=build/types $(PY) -m mypy tools tests setup.py

clean: ## remove what builds and tools leave; keeps .venv and runs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find megalite kernels tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove .venv and the built extension; keeps runs
	rm -rf $(VENV) megalite/_C.*
