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
PLAN     ?= protocols/plans/evidence/plan.toml
JOBS     ?= $(shell getconf _NPROCESSORS_ONLN)
COCO     ?= $(if $(DATA),$(DATA),data)/coco
ARGS     ?=
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

.DEFAULT_GOAL := help
.PHONY: help libtorch build pretrain test ranks check smoke bench evidence detect install doctor clean

help: ## This list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12
	@echo
	@echo "pretrain takes RECIPE=file OUT=folder DATA=folder METHOD=name DEVICE=auto|cpu|cuda:N SET=\"a.b=v c.d=w\" RESUME=1 RANKS=n"
	@echo "RANKS=n builds with MPI (FEATURES=mpi) and starts n processes with MPIRUN=mpirun"
	@echo "evidence takes DATA=folder JOBS=runs-side-by-side PLAN=file OUT=folder ARGS=--report-only"
	@echo "detect takes EXPORT=folder COCO=folder OUT=folder ARGS=\"--limit 20 --set epochs=1\" DETECT_VENV=folder"
	@echo "TORCH=cpu|cuda chooses the libtorch to bring; LIBTORCH=/path uses yours"

libtorch: ## Bring libtorch from PyPI (540 MB, once per user)
	@.cargo/libtorch

build: libtorch ## Bring libtorch and build both binaries
	@$(CARGO) build --release $(if $(FEATURES),--features $(FEATURES))

pretrain: build ## Pre-train a cohort (the quickstart: L-MCL on synthetic images, under two minutes)
	@$(LAUNCH) $(BIN)/mcl-train run $(RECIPE) --device $(DEVICE) $(if $(OUT),--out $(OUT)) $(if $(DATA),--data $(DATA)) \
	  $(if $(METHOD),--set method.name=$(METHOD)) $(foreach s,$(SET),--set '$(s)') $(if $(RESUME),--resume)

test: libtorch ## Build and run all tests
	$(CARGO) test --release

ranks: libtorch ## Build with MPI and test several ranks (needs mpicc, mpirun and libclang)
	$(CARGO) test --release --features mpi --test ranks

check: test ## Tests, format, lints, documentation
	$(CARGO) fmt --check
	$(CARGO) clippy --release --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --release --no-deps

smoke: build ## Train, probe and report on synthetic data, under two minutes
	@rm -rf $(SMOKE)
	@$(BIN)/mcl-train run protocols/pretrain/quickstart.toml --out $(SMOKE)/run --set train.epochs=3
	@$(BIN)/mcl-eval linear-probe --run $(SMOKE)/run --dataset synthetic --protocol lbfgs
	@$(BIN)/mcl-eval report --run $(SMOKE)/run --out $(SMOKE)/report
	@test -s $(SMOKE)/report/report.html && echo "smoke: passed"

bench: libtorch ## Timings (compare them with the peers in one sitting, on a quiet machine)
	$(CARGO) bench

evidence: build ## Make what is missing of reports/evidence: runs, measurements, report (hours; stops and goes on at any point)
	@$(BIN)/mcl-eval evidence $(PLAN) --threads 1 --jobs $(JOBS) --device $(DEVICE) $(if $(OUT),--out $(OUT),--readme src/experiment/README.md) $(if $(DATA),--data $(DATA)) $(ARGS)

detect: $(DETECT_VENV)/ready ## Train Mask R-CNN on COCO from an exported backbone, measure mAP
	@test -n "$(EXPORT)" || { echo "detect: EXPORT=folder is missing, for example runs/latest/export/peer-0/torchvision (mcl-eval export makes it)" >&2; exit 2; }
	@$(DETECT_VENV)/bin/python protocols/coco/detect.py --export $(EXPORT) --coco $(COCO) --out $(if $(OUT),$(OUT),$(EXPORT)/detect) $(ARGS)

# An environment of its own: nothing else here needs Python's torch.
$(DETECT_VENV)/ready: protocols/coco/requirements.txt
	python3 -m venv $(DETECT_VENV)
	$(DETECT_VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

install: build ## Copy both binaries to $(PREFIX)/bin
	@mkdir -p $(PREFIX)/bin
	@install -m 755 $(BIN)/mcl-train $(BIN)/mcl-eval $(PREFIX)/bin/
	@echo "installed mcl-train and mcl-eval in $(PREFIX)/bin"

doctor: build ## Check libtorch, devices, datasets, disk
	@$(BIN)/mcl-eval doctor $(if $(DATA),--data $(DATA))

clean: ## Remove what cargo built (libtorch and runs stay)
	$(CARGO) clean
