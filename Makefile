# Every command of the project. `make` alone lists them.
SHELL := bash
.DEFAULT_GOAL := help

CONFIG ?= conf/gateway.toml
target := $(or $(CARGO_TARGET_DIR),target)
# a kvgate that is built already, for demo and run; without it they build one
KVGATE ?=
kvgate = $(or $(KVGATE),$(target)/release/kvgate)
scoreboard := $(target)/release/kvgate-scoreboard
SECONDS_ ?= 600
FUZZ_SECONDS ?= 60

.PHONY: help demo run test check bench rig scoreboard soak fuzz build release cmake

help: ## List the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: release ## Start simulated engines and the gateway, and measure what routing by cache saves
	$(kvgate) demo

run: release ## Run the gateway with CONFIG=conf/gateway.toml
	$(kvgate) run --config $(CONFIG)

test: build ## Run every test
	@if python=$$(.ci/need pyzmq); then export KVGATE_PYTHON="$$python"; fi; \
	export KVGATE="$(abspath $(target))/debug/kvgate"; \
	set -ex; \
	if cargo nextest --version >/dev/null 2>&1; then \
		cargo test --workspace --doc --quiet; \
		cargo nextest run --workspace; \
	else \
		cargo test --workspace; \
	fi

check: cmake ## Formatting, lints, documentation, dependencies, Dockerfile, fuzz targets, shipped configurations
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	deny=$$(.ci/need cargo-deny) && "$$deny" --workspace --locked check licenses bans sources
	if lint=$$(.ci/need hadolint); then "$$lint" docker/Dockerfile; fi
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	if .ci/need c++ >/dev/null; then fuzz/run 3; fi
	@$(MAKE) --no-print-directory build
	set -e; for config in conf/*.toml; do $(target)/debug/kvgate check --config "$$config"; done

bench: cmake ## Measure the hot path, part by part, beside a naive pipeline (some minutes)
	cargo bench -p kvgate-bench

rig: cmake ## Measure kvgate beside Pingora alone (some minutes); benchmarks/rig/README.md adds other proxies
	WITHOUT_PEERS=1 benchmarks/rig/setup.sh
	rm -f $(target)/rig.jsonl
	benchmarks/rig/bench.py run pingora-floor pingora-floor-sim kvgate-rr kvgate-trie kvgate-chwbl kvgate-kv --rounds 1 --out $(target)/rig.jsonl
	benchmarks/rig/bench.py report $(target)/rig.jsonl --ref pingora-floor

# QUICK=1 takes a tenth of the time. The table of docs/reliability.md is written when all rows are measured.
scoreboard: release ## Measure what holds under fire, row by row (ROWS="7 9": these alone), into docs/reliability.md
	cargo build --release -p kvgate-scoreboard
	$(if $(ROWS),$(if $(filter 26,$(ROWS)),fuzz/run build),fuzz/run build)
	$(scoreboard) rows --kvgate $(abspath $(kvgate)) $(if $(QUICK),--quick) $(if $(ROWS),$(ROWS),--write docs/reliability.md)

soak: release ## Mix load, faults and reloads for ten minutes (SECONDS_=60: for one), and assert what must hold
	cargo build --release -p kvgate-scoreboard
	$(scoreboard) soak --kvgate $(abspath $(kvgate)) --seconds $(SECONDS_)

fuzz: ## Feed what strangers send with made-up inputs, FUZZ_SECONDS=60 for each target
	.ci/need c++ >/dev/null
	fuzz/run $(FUZZ_SECONDS)

# One build for check and test: the same packages and targets, so that nothing is compiled twice.
build: cmake
	cargo build --workspace --bins --tests

release: cmake
	$(if $(KVGATE),,cargo build --release -p kvgate --bin kvgate)

cmake:
	@.ci/need cmake >/dev/null
