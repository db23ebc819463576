# make demo   a tour on a small scene: train, evaluate, render, export, plan
# make test   lint and all tests
# make lint   ruff and mypy
# make venv   only the environment in .venv
#
# Each sets up what it needs first, once. PYTHON=... chooses the interpreter (3.10 or 3.11) of a new environment.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# a new name, and so a new installation, for other requirements
STAMP := $(VENV)/installed-$(shell sha256sum pyproject.toml | cut -c1-12)

FITTING = $(shell $(1) -c 'import sys; print(*[1] * ((3, 10) <= sys.version_info[:2] < (3, 12)))' 2>/dev/null)
PYTHON ?= $(firstword $(foreach name,python3.11 python3.10 python3,$(if $(call FITTING,$(name)),$(name))))

# open3d, which reads sparse_pc.ply and writes meshes, links against these; ns-render writes videos with ffmpeg
PACKAGES := libegl1 libgl1 libgomp1 libidn2-0 libudev1 libusb-1.0-0 libx11-6 ffmpeg
TEST_PACKAGES := $(PACKAGES) chromium

.PHONY: demo test lint venv packages test-packages
.DEFAULT_GOAL := demo

demo: packages $(STAMP)
	@$(BIN)/python -m odin_nerfstudio.demo

test: test-packages lint
	@$(BIN)/python -m pytest --durations=10

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

venv: $(STAMP)

$(STAMP):
	@if [ -z "$(PYTHON)" ]; then echo "error: found no Python 3.10 or 3.11; name one with PYTHON=..." >&2; exit 1; fi
	@if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(call install,python3-venv); fi
	@echo "Setting up $(VENV), about 5 minutes the first time"
	@echo "1/3 virtual environment, with $$($(PYTHON) --version)"
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV)
	@echo "2/3 torch and torchvision, the largest download"
	@$(BIN)/pip install -qq torch torchvision
	@echo "3/3 nerfstudio, gsplat, the tools for tests, and this package"
	@$(BIN)/pip install -qq --editable '.[dev]'
	@rm -f $(VENV)/installed-*
	@touch $@

packages:
	@$(call install,$(PACKAGES))

test-packages:
	@$(call install,$(TEST_PACKAGES))

# Debian packages: as root whatever is missing is installed, otherwise the line to run is printed. Elsewhere: nothing.
define install
if command -v dpkg-query >/dev/null; then \
  missing=(); \
  for package in $(1); do \
    dpkg-query --show --showformat='$${db:Status-Status}' $$package 2>/dev/null | grep -qx installed || missing+=($$package); \
  done; \
  if [ $${#missing[@]} -gt 0 ] && [ $$(id -u) -ne 0 ]; then \
    echo "error: Debian packages are missing; run: sudo apt-get install $${missing[*]}" >&2; exit 1; \
  elif [ $${#missing[@]} -gt 0 ]; then \
    echo "Installing Debian packages: $${missing[*]}"; \
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $${missing[*]} >/dev/null || exit 1; \
  fi; \
fi
endef
