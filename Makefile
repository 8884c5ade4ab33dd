# The things one does with this repository. Each target is one command; the work is in scripts/.
#
# ARGS goes to the command: make run ARGS="--help", make torture ARGS=stale_fence

SHELL := /bin/bash
.DEFAULT_GOAL := help
ARGS ?=

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r target text; do \
		printf '  make %-14s %s\n' "$$target" "$$text"; done

.PHONY: run
run: ## start the server on an embedded SQLite database in ./semel-data
	cargo run --release -p semel-server --bin semel -- serve $(ARGS)

.PHONY: install
install: ## build the program and put it into cargo's bin directory
	cargo install --locked --path crates/semel-server --bin semel

.PHONY: test
test: ## everything that must pass: the checks, then all tests on real, private servers
	scripts/test.sh

.PHONY: check
check: ## format, clippy and rustdoc, without warnings; quick, needs no servers
	scripts/check.sh

.PHONY: bench
bench: ## measure, next to what pgbench gets out of the same machine
	scripts/bench.sh $(ARGS)

.PHONY: torture
torture: ## the tests in their long versions: more rounds, more crashes, more load
	scripts/torture.sh $(ARGS)

.PHONY: mutants
mutants: ## breaks the code on purpose, one guarantee at a time, and names the test that notices
	scripts/mutants.sh $(ARGS)

.PHONY: fuzz
fuzz: ## fuzz and property tests with many more cases (SEMEL_FUZZ_SECONDS, PROPTEST_CASES)
	scripts/fuzz.sh $(ARGS)

.PHONY: clean-servers
clean-servers: ## stop the private servers that a killed run left behind
	scripts/postgres.sh clean
	scripts/rabbitmq.sh clean
