# People, the README and CI call the same targets. Everything lives in .venv inside this checkout.
# Paths are relative throughout, so that the checkout may lie below a directory with a space in its name.
.DEFAULT_GOAL := help
SHELL := /bin/sh
# For the environment: several targets of one command run one after the other, and what a recipe
# starts does not inherit it.
MAKEFLAGS += $(if $(word 2,$(MAKECMDGOALS)),,--jobs=2)
unexport MAKEFLAGS MFLAGS

# The Python to build the environment with.
runs = $(foreach p,$(1),$(shell $(p) -c '' 2>/dev/null && echo $(p)))
PYTHON ?= $(firstword $(call runs,python3.11 python3.12 python3.13 python3))
# torch is installed first, pinned; where pip would choose a build for another machine, point it to
# the right one by pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
TORCH ?= torch==2.13.0
BUDGET ?= 90s
# The wheels: Python 3.11 has one of its own, every newer Python loads that of the stable ABI.
PYTHONS ?= $(call runs,python3.11) $(firstword $(call runs,python3.12 python3.13 python3.14))
ARCHS ?= x86_64 aarch64
GLIBC ?= 2.28
# Processes that run the tests, file by file: they wait for the disk a third of the time.
WORKERS ?= 3
# In the order of the folders, which end with short files; by the number of tests a long one would be last.
XDIST := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PACKAGES := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*(p for extra in sys.argv[1:] for p in (project | project["optional-dependencies"])[extra]))
WHEEL_LIST := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["wheels"])
NARROWER := import recorded_cpus; print(*recorded_cpus.narrower())
# The files with tests marked isa: collecting all the others takes longer than these tests. Each CPU has one process:
# several would load torch and collect in each, which takes as long as the tests.
ISA_TESTS := grep -rl --include='test_*.py' 'mark\.isa' tests
NATIVE := CMakeLists.txt pyproject.toml $(wildcard src/fastlstm/csrc/*.* src/fastlstm/csrc/*/*.*)

# Where CMake finds no Ninja it uses make, which compiles one file at a time if it is not told more.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)
# The processes of the tests share what Python has compiled.
unexport PYTHONDONTWRITEBYTECODE

MARKS := $(addprefix .venv/.,place native packages dev-packages made dev docs)
# An environment that was moved or copied points to its old place: make it again.
$(shell test "$$(cat .venv/.place 2>/dev/null)" = "$$(pwd -P)" || rm -f $(MARKS) build/tools/.made)

.PHONY: help demo install test test-isa test-wheel test-arm test-arm-python gpu check format sanitize bench notebooks docs wheels clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## */  make \1\t/p' Makefile

demo: install  ## install, train 90 seconds on the text of Python's own manual, and write some text
	rm -rf runs/demo
	.venv/bin/fastlstm train python-docs --out runs/demo --budget $(BUDGET)
	.venv/bin/fastlstm generate runs/demo --length 600 --temperature 0.7

install: .venv/.made  ## the environment with fastlstm in it

test: .venv/.dev  ## the whole test suite; with CPU=avx2 as on such a CPU
	$(PY) -m pytest $(XDIST) $(if $(CPU),--cpu=$(CPU))

test-isa: .venv/.dev  ## the tests that depend on the CPU, as on narrower ones, the narrowest without oneDNN
	@cpus=$$(env -u FASTLSTM_ISA PYTHONPATH=tests $(PY) -c '$(NARROWER)') || exit 1; \
	tests=$$($(ISA_TESTS)); export tests; \
	printf '%s\n' $${cpus:-own} | xargs -P $(CMAKE_BUILD_PARALLEL_LEVEL) -I CPU sh -c ' \
		case CPU in own) as=--no-onednn;; scalar) as="--cpu=scalar --no-onednn";; *) as=--cpu=CPU;; esac; \
		said=$$($(PY) -m pytest -q -p no:cacheprovider -m isa $$as $$tests 2>&1); status=$$?; \
		printf "the tests marked isa, %s\n%s\n" "$$as" "$$said"; exit $$status'

test-wheel: .venv/.dev  ## the whole suite against the wheel in dist/, not the checkout; after `make wheels`
	rm -rf build/installed
	mkdir -p build
	cp -Rl .venv build/installed
	build/installed/bin/python -m pip install --quiet --force-reinstall --no-deps --no-index --find-links dist --only-binary :all: fastlstm
	build/installed/bin/python -m pytest $(XDIST)

gpu: .venv/.dev  ## the tests and measurements that need an NVIDIA GPU; without one it says so
	$(PY) benchmarks/gpu.py

check: .venv/.dev  ## formatting, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/clang-format --dry-run -Werror $$(find src/fastlstm/csrc -name '*.h' -o -name '*.cpp')

format: .venv/.dev  ## put Python and C++ into the common format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
	.venv/bin/clang-format -i $$(find src/fastlstm/csrc -name '*.h' -o -name '*.cpp')

test-arm:  ## the kernels for Arm CPUs, compiled here and run by qemu-aarch64 (g++-aarch64-linux-gnu, qemu-user); no Python; PART=n: every n-th case
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || { \
		echo "the kernels for Arm are not tested: no g++-aarch64-linux-gnu and qemu-user"; exit 0; }; \
	CXX=aarch64-linux-gnu-g++ RUN="qemu-aarch64 -L /usr/aarch64-linux-gnu" PART=$(PART) tests/native/sanitize.sh none

test-arm-python: .venv/.dev  ## tests/ops with Python and torch for Arm CPUs, run by qemu-aarch64 (on Debian, with the same packages)
	tests/native/arm_python.sh $(or $(TESTS),tests/ops)

sanitize:  ## the kernels under the address, undefined-behaviour and thread sanitizers; no Python
	tests/native/sanitize.sh

bench: install  ## what this machine is and what it was measured to reach
	.venv/bin/fastlstm doctor --measure

notebooks: .venv/.dev  ## runs docs/notebooks and stores their outputs
	$(PY) docs/execute.py

docs: .venv/.docs  ## the documentation site in build/site, after the pages that are generated
	$(PY) docs/reference.py > docs/cli.md
	$(PY) docs/source_map.py
	$(PY) docs/gallery.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

wheels: build/tools/.made  ## dist/: the sdist, and from it a wheel for each of PYTHONS and ARCHS
	rm -rf build/dist
	build/tools/bin/python -m build --quiet --sdist --outdir build/dist
	set -e; PATH="$$PWD/build/tools/bin:$$PATH"; for python in $(PYTHONS); do for arch in $(ARCHS); do \
		rm -rf build/wheel; \
		printf '#!/bin/sh\nexec zig c++ -target %s -g0 "$$@"\n' "$$arch-linux-gnu.$(GLIBC)" > build/tools/bin/zig-c++; \
		chmod +x build/tools/bin/zig-c++; CXX=zig-c++ \
		CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$$arch" \
		_PYTHON_HOST_PLATFORM="linux-$$arch" \
		SETUPTOOLS_EXT_SUFFIX=".$$($$python -c 'import sys; print(sys.implementation.cache_tag)')-$$arch-linux-gnu.so" \
		$$python -m pip wheel --quiet --no-deps --wheel-dir build/wheel build/dist/*.tar.gz; \
		case $$(echo build/wheel/*.whl) in *-abi3-*) abi3audit --strict build/wheel/*.whl;; esac; \
		auditwheel repair --wheel-dir build/dist build/wheel/*.whl; \
	done; done
	rm -rf dist
	mv build/dist dist

clean:  ## remove the environment and everything built; runs/ stays
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.place:
	@test -n "$(PYTHON)" || { echo "fastlstm needs Python 3.11 or newer: install it with 'apt-get install python3.11 python3.11-venv python3.11-dev'." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fastlstm needs Python 3.11 or newer, $(PYTHON) is older or does not run: install one and run 'make PYTHON=python3.11'." >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "fastlstm needs Python's venv module: install it with 'apt-get install python3-venv'." >&2; exit 1; }
	@if [ -n "$$CXX" ]; then set -- "$$CXX"; else set -- c++ g++ clang++; fi; \
	for compiler; do if command -v "$${compiler%% *}" >/dev/null; then exit 0; fi; done; \
	echo "fastlstm needs a C++20 compiler and found none: install one with 'apt-get install g++' on Debian or Ubuntu, 'dnf install gcc-c++' on Fedora, 'xcode-select --install' on macOS." >&2; exit 1
	"$(PYTHON)" -m venv --clear .venv
	@pwd -P > $@

build/tools/.made: .venv/.place pyproject.toml
	$(PY) -m venv --clear build/tools
	build/tools/bin/python -m pip install --quiet $$($(PY) -c '$(WHEEL_LIST)')
	ln -s "$$PWD"/build/tools/lib/python3.*/site-packages/ziglang/zig build/tools/bin/zig
	@touch $@

# The kernels are compiled while pip downloads: neither needs the other.
.venv/.native: .venv/.place $(NATIVE)
	$(PIP) install --quiet --no-compile --no-deps --editable .
	@touch $@

.venv/.packages: .venv/.place pyproject.toml
	$(PIP) install --quiet --no-compile "$(TORCH)" $$($(PY) -c '$(PACKAGES)' dependencies bpe serve)
	@touch $@

.venv/.dev-packages: .venv/.packages
	$(PIP) install --quiet --no-compile $$($(PY) -c '$(PACKAGES)' dev)
	@touch $@

.venv/.made: .venv/.native .venv/.packages
	@touch $@

.venv/.dev: .venv/.made .venv/.dev-packages
	@touch $@

.venv/.docs: .venv/.made
	$(PIP) install --quiet --no-compile $$($(PY) -c '$(PACKAGES)' docs)
	@touch $@
