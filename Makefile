# `make` lists the targets. Everything builds with --release: one profile, so that the dependencies compile once.

# PROTOCOL is what RECIPE was called before, and still means it.
RECIPE   ?= $(if $(PROTOCOL),$(PROTOCOL),protocols/pretrain/quickstart.toml)
OUT      ?=
DATA     ?=
METHOD   ?=
DEVICE   ?= auto
SET      ?=
RESUME   ?=
RANKS    ?=
EXPORT   ?=
PLAN     ?= protocols/plans/evidence.toml
SCALE    ?= small
JOBS     ?= $(shell getconf _NPROCESSORS_ONLN)
GPUS     ?=
COCO     ?= $(if $(DATA),$(DATA),data)/coco
ARGS     ?=
SEED     ?= 1
PREFIX   ?= $(HOME)/.cargo

# Several ranks need MPI in the build; the default build needs none.
FEATURES ?= $(if $(RANKS),mpi)
MPIRUN   ?= mpirun

CARGO  ?= cargo
# What the programs were built from. Only the two programs read it: a commit recompiles neither the library nor the C++.
export MCL_COMMIT := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
BIN     = $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)/release
LAUNCH  = $(if $(RANKS),$(MPIRUN) -n $(RANKS))
SMOKE   = $(BIN)/smoke
DETECT_VENV ?= $(HOME)/.cache/mcl/detect
PEERS_VENV  ?= $(HOME)/.cache/mcl/peers
# The Python that benches ask for the other half of their tables; none where it is empty.
PEER_PYTHON ?= $(wildcard $(PEERS_VENV)/bin/python)

.DEFAULT_GOAL := help
.PHONY: help libtorch build pretrain test hostile kills ranks check smoke bench peers evidence table detect install wheel doctor clean

help: ## This list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12
	@echo
	@echo "pretrain takes RECIPE=file OUT=folder DATA=folder METHOD=name DEVICE=auto|cpu|cuda:N SET=\"a.b=v c.d=w\" RESUME=1 RANKS=n"
	@echo "RANKS=n builds with MPI (FEATURES=mpi) and starts n processes with MPIRUN=mpirun"
	@echo "hostile takes N=inputs SEED=number"
	@echo "kills takes N=how-many SEED=number"
	@echo "evidence takes DATA=folder JOBS=runs-side-by-side PLAN=file OUT=folder ARGS=--report-only"
	@echo "table takes PLAN=name SCALE=small|paper DATA=folder JOBS=runs-side-by-side OUT=folder SET=\"a.b=v\" ARGS=--report-only"
	@echo "detect takes EXPORT=folder COCO=folder OUT=folder GPUS=n ARGS=\"--limit 20 --set epochs=1\" DETECT_VENV=folder"
	@echo "bench takes PEER_PYTHON=python-of-the-peers [what make peers installed]"
	@echo "TORCH=cpu|cuda chooses the libtorch to bring; LIBTORCH=/path uses yours"

libtorch: ## Bring libtorch from PyPI (540 MB, once per user)
	@.cargo/libtorch

build: libtorch ## Bring libtorch and build both binaries
	@$(CARGO) build --release $(if $(FEATURES),--features $(FEATURES))

pretrain: build ## Pre-train a cohort (the quickstart: L-MCL on synthetic images, under a minute)
	@$(LAUNCH) $(BIN)/mcl-train run $(RECIPE) --device $(DEVICE) $(if $(OUT),--out $(OUT)) $(if $(DATA),--data $(DATA)) \
	  $(if $(METHOD),--set method.name=$(METHOD)) $(foreach s,$(SET),--set '$(s)') $(if $(RESUME),--resume)

test: libtorch ## Build and run all tests
	$(CARGO) test --release

hostile: libtorch ## Damage N inputs of every kind by SEED and read them with little memory (what fails is kept)
	MCL_HOSTILE=$(or $(N),20000) MCL_HOSTILE_SEED=$(SEED) $(CARGO) test --release --test hostile

kills: libtorch ## Kill runs and experiments N times, at any moment and inside saves; let calls of the disk fail; compare every bit
	KILLS=$(or $(N),200) SEED=$(SEED) $(CARGO) test --release --test kills -- --ignored --nocapture

ranks: libtorch ## Build with MPI and test several ranks (needs mpicc, mpirun and libclang)
	$(CARGO) test --release --features mpi --test ranks

check: test ## Tests, format, lints, documentation
	$(CARGO) fmt --check
	$(CARGO) clippy --release --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --release --no-deps

smoke: build ## Train, probe and report on synthetic data, under a minute
	@rm -rf $(SMOKE)
	@$(BIN)/mcl-train run protocols/pretrain/quickstart.toml --out $(SMOKE)/run --set train.epochs=3
	@$(BIN)/mcl-eval linear-probe --run $(SMOKE)/run --dataset synthetic --protocol lbfgs
	@$(BIN)/mcl-eval report --run $(SMOKE)/run --out $(SMOKE)/report
	@test -s $(SMOKE)/report/report.html && echo "smoke: passed"

bench: libtorch ## Timings, ours beside the peers' where there are any (on a quiet machine)
	PEER_PYTHON=$(PEER_PYTHON) $(CARGO) bench

peers: $(PEERS_VENV)/ready ## Install what `make bench` compares with: PyTorch, scikit-learn, openTSNE (2 GB)

$(PEERS_VENV)/ready: benches/peers/requirements.txt
	python3 -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

evidence: build ## Make what is missing of reports/evidence: runs, measurements, report (hours; stops and goes on at any point)
	@$(BIN)/mcl-eval evidence $(PLAN) --threads 1 --jobs $(JOBS) --device $(DEVICE) $(if $(OUT),--out $(OUT),--readme README.md --readme src/experiment/README.md) $(if $(DATA),--data $(DATA)) $(ARGS)

table: build ## Make a table or figure of the paper (PLAN=cifar100-same SCALE=small|paper; `mcl-train list plans`)
	@$(BIN)/mcl-eval table $(PLAN) --scale $(SCALE) --threads 1 --jobs $(JOBS) --device $(DEVICE) $(if $(OUT),--out $(OUT)) $(if $(DATA),--data $(DATA)) $(foreach s,$(SET),--set '$(s)') $(ARGS)

detect: $(DETECT_VENV)/ready ## Train Mask R-CNN on COCO from an exported backbone, measure mAP
	@test -n "$(EXPORT)" || { echo "detect: EXPORT=folder is missing, for example runs/latest/export/peer-0/torchvision (mcl-eval export makes it)" >&2; exit 2; }
	@$(DETECT_VENV)/bin/$(if $(GPUS),torchrun --standalone --nproc-per-node $(GPUS),python) protocols/coco/detect.py --export $(EXPORT) --coco $(COCO) --out $(if $(OUT),$(OUT),$(EXPORT)/detect) $(ARGS)

# An environment of its own: nothing else here needs Python's torch.
$(DETECT_VENV)/ready: protocols/coco/requirements.txt
	python3 -m venv $(DETECT_VENV)
	$(DETECT_VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

install: build ## Copy both binaries to $(PREFIX)/bin
	@mkdir -p $(PREFIX)/bin
	@install -m 755 $(BIN)/mcl-train $(BIN)/mcl-eval $(PREFIX)/bin/
	@echo "installed mcl-train and mcl-eval in $(PREFIX)/bin"

wheel: build ## Pack both programs into a Python wheel that runs on the torch package (dist/mcl-*.whl; TORCH=cpu serves CUDA too)
	@python3 .cargo/wheel.py --bin $(BIN) --out dist

doctor: build ## Check libtorch, devices, datasets, disk
	@$(BIN)/mcl-eval doctor $(if $(DATA),--data $(DATA))

clean: ## Remove what cargo built (libtorch and runs stay)
	$(CARGO) clean
