# What can be done here. The work itself is in packaging/ and tests/; see HACKING.md.

.PHONY: help run stop install uninstall deb test test-unit test-systemd test-machine test-engine chaos fuzz bench lint clean
.DEFAULT_GOAL := help

help: ## show this
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand --tabs=24

run: ## start the product with two simulated replicas and show what it does (ENGINE=vllm-cpu: a real vLLM; PORT=18000)
	@ENGINE=$(or $(ENGINE),simulator) PORT=$(or $(PORT),18000) packaging/run

stop: ## end what `make run` started and take it away
	@packaging/stop

install: ## install into your home, for keeps; no root (LISTEN=127.0.0.1:8000)
	@packaging/install

uninstall: ## take the installation away again (PURGE=1: configuration and state too)
	@packaging/uninstall

deb: ## a Debian package for the Debian that this runs on, into dist/ (LISTEN=127.0.0.1:8000)
	@packaging/deb/build

test: ## every test of the main tiers: style, types, unit, systemd, a booted Debian 13
	@packaging/test lint unit systemd machine

test-unit: ## only the tests that need nothing but Python (TESTS=tests/core: some of them)
	@packaging/test unit

test-systemd: ## only the tests on a real user manager
	@packaging/test systemd

test-machine: ## only the tests on a booted Debian 13
	@packaging/test machine

test-engine: ## the tests with a real vLLM on the CPU
	@packaging/test engine

chaos: ## a random history of the supervisor in virtual time, made from a seed (SEED=7; SEEDS=1000: so many, from there on)
	@SEED=$(or $(SEED),1) SEEDS=$(or $(SEEDS),1) packaging/chaos

fuzz: ## coverage-guided fuzzing of the parsers that strangers reach, a minute each (SECONDS_EACH=600; TARGETS="form json")
	@packaging/fuzz

bench: ## the benchmarks
	@packaging/test bench

lint: ## style and types
	@packaging/test lint

clean: stop ## remove everything that was made in the checkout, the virtual environment too
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
