# Everything one does with Partywall from a source tree. `make help` lists the targets.
#
# Each target says what it does; the steps themselves are in scripts/, one file per job.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Where cargo puts what it builds. Every script finds it in the environment.
export TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
RELEASE := $(TARGET_DIR)/release
DEMO := $(TARGET_DIR)/demo

# Where `make install` puts things. DESTDIR goes in front, for packagers.
PREFIX ?= /usr/local
DESTDIR ?=
# How long `make soak` runs, and how long `make fuzz` spends on each target.
SOAK_SECONDS ?= 60
FUZZ_SECONDS ?= 60
# Which of the benches `make bench` runs, and with which options; `make demo` likewise.
BENCHES ?= ipc stream latency cpu advise
BENCH_ARGS ?= --quick
DEMO_ARGS ?=
EXTRAS ?=
export PREFIX DESTDIR EXTRAS SOAK_SECONDS FUZZ_SECONDS

# What `partywall --version` of optimised builds tells; other builds need not be made anew for each commit.
COMMIT = $(shell git describe --always --dirty --abbrev=12 2> /dev/null)

.PHONY: help nas setup setup-fuzz setup-deny setup-programs build portable wheel deb check test compat demo demo-programs bench lab soak fuzz loom install uninstall clean

help: ## list the targets
	@echo "Partywall: make <target>"
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' Makefile | expand -t 14

setup: ## install what the build needs and this machine lacks (Debian packages; says what to do about the rest)
	@scripts/setup.sh

setup-fuzz: setup ## the same, and cargo-fuzz
	@scripts/setup.sh fuzz

setup-deny: setup ## the same, and cargo-deny, which looks for advisories against dependencies
	@scripts/setup.sh deny

build: setup ## build the programs, the preloaded library and the library for C, optimised
	@echo "build: programs, the preloaded library and the library for C, optimised, into $(RELEASE)"
	@PARTYWALL_COMMIT=$(COMMIT) cargo build --release --workspace --exclude xtask --bins
	@cargo build --release --package partywall-preload
	@cargo build --release --package partywall-capi

portable: setup ## build for other distributions: the preloaded library for glibc 2.17 and later, partywall and its agent without any
	@scripts/setup.sh portable
	@PARTYWALL_COMMIT=$(COMMIT) scripts/portable.sh

wheel: setup ## build the Python package: a wheel for CPython 3.11 and later, in target/wheels
	@scripts/wheel.sh

deb: build ## make Debian packages, an SBOM and checksums, in target/deb (`make portable` first: then containers may have older C libraries)
	@scripts/setup.sh packages
	@preload=$(TARGET_DIR)/$$(uname -m)-unknown-linux-gnu/release/libpartywall_preload.so; \
		if [ -e "$$preload" ]; then export PRELOAD="$$preload"; echo "deb: with the library of \`make portable\`, $$(date -r "$$preload" '+%F %T')"; \
		else echo "deb: the library needs the C library of this machine or a newer one; \`make portable\` makes one for containers with older ones"; fi; \
		scripts/deb.sh release

check: setup ## the quick gate: format, lints, layers, unsafe, licences, advisories, links, wording, examples, documentation, unit tests
	@scripts/check.sh

setup-programs: setup ## install the programs that tests and benches run without and with the library
	@scripts/setup.sh programs

compat: setup-programs ## CPython's own tests of everything that has sockets, without and with the library, here and in a virtual machine (an hour)
	@scripts/compat.sh

test: setup-fuzz setup-programs ## everything: the gate, all tests, loom models, a while of fuzzing, the demo in short
	@scripts/test.sh

demo: setup ## a file, a tree, a mount and redis between two domains and two virtual machines, beside TCP; and two machines without Partywall
	@scripts/setup.sh demo
	@$(MAKE) demo-programs
	@echo "demo: partywall demo $(DEMO_ARGS)"
	@"$(DEMO)/partywall" demo $(DEMO_ARGS)

demo-programs:
	@echo "demo: building what it shows, into $(DEMO): the first time, some three minutes on two processors"
	@cargo build --profile demo --bins --lib -p partywall-cli -p partywall-daemon -p partywall-preload -p partywall-agent -p partywall-lab -p partywall-fs -p partywall-vhost

bench: build ## measure (BENCHES="ipc stream ...", BENCH_ARGS="--quick")
	@for bench in $(BENCHES); do \
		echo "bench: partywall bench $$bench $(BENCH_ARGS)"; \
		"$(RELEASE)/partywall" bench $$bench $(BENCH_ARGS); \
	done

lab: setup ## two virtual machines that share memory, to play with; another terminal gets a shell (it says how)
	@scripts/setup.sh machines
	@cargo build --release -p partywall-cli -p partywall-daemon -p partywall-agent -p partywall-lab --bins
	@"$(RELEASE)/partywall-lab" up

nas: setup ## a storage appliance of four virtual machines, beside one machine and beside four over bridge and NBD (NAS_ARGS="--runs 1"); NAS_ARGS=up: to look at
	@scripts/setup.sh machines
	@scripts/setup.sh nas
	@cargo build --release -p partywall-cli -p partywall-daemon -p partywall-agent -p partywall-lab -p partywall-vhost --bins
	@"$(RELEASE)/partywall-lab" nas $(NAS_ARGS)

soak: setup ## random sizes, pauses and kills under checksums, and peers that lie, Node and Java beside TCP, for SOAK_SECONDS (60) each
	@scripts/soak.sh

fuzz: setup-fuzz ## fuzz each target for FUZZ_SECONDS (60)
	@scripts/fuzz.sh

loom: setup ## model-check ring, wake-up and channel over every interleaving
	@scripts/loom.sh

install: ## install programs, the preloaded library, the library for C with its header, man pages, completions and systemd units below PREFIX (/usr/local); EXTRAS=yes: bench and lab too
	@scripts/install.sh

uninstall: ## remove what `make install` has put below PREFIX
	@scripts/install.sh uninstall

clean: ## remove what was built
	@echo "clean: removing $(TARGET_DIR) and what fuzzing made"
	@cargo clean --quiet
	@rm -rf fuzz/target fuzz/artifacts fuzz/corpus fuzz/coverage
