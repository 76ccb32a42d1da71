# Decoupled DiLoCo operator.
#
#   make demo           install what is missing, build, train a real ensemble from a sample job on real text
#   make test           the same for all tests
#   make                build everything into build/<variant>
#   make deps           install the Debian packages that build, demo and tests need, saying what each is for
#   make unit           unit tests only
#   make integration    tests with real processes on loopback only
#   make sanitize       unit tests under address, undefined and thread sanitizers
#   make test-compat    open our weights in transformers (own venv from PyPI, 5.6 GB)
#   make bench          benchmarks beside yardsticks in the same run, against goals and the stored baseline (ONLY="merge start":
#                       only these); figures in build/results/; make bench-baseline stores them as the baseline
#   make bench-operator the operator against 1,000 jobs and 10,000 pods in a real API server (root; YARDSTICK=1: and a Go controller)
#   make bench-deps     PyTorch as the trainer's yardstick (the same venv)
#   make experiment     quality of every synchronisation form at equal tokens, under 25 minutes; -long for hours
#   make lint           formatting, static analysis, include rules, banned calls, what documents name
#   make lint-selftest  plants a fault for each gate and expects it to turn red
#   make manifests      what is made from sources but kept: CRD, job reference, helm/install.yaml (HELM=path of helm)
#   make install        programs, library and header below $(DESTDIR)$(PREFIX)
#   make images         container images as OCI archives in build/<variant>/images, without a container engine
#   make test-cluster   tests on a real Kubernetes of two nodes that is brought up here (root), or on KUBECONFIG's
#   make demo-cluster   the same cluster with the chart and a sample job that trains; left up to look around
#   make clean          remove build/
#
# Variables: SAN=address|undefined|thread  DEBUG=1  V=1 (show commands)  PREFIX=/usr/local  JOB=job.yaml (for demo)
#            IMAGE_PREFIX=localhost  IMAGE_TAG=dev (for images)

SHELL := /bin/bash
.DEFAULT_GOAL := all
.DELETE_ON_ERROR:

SAN ?=
DEBUG ?=
PREFIX ?= /usr/local
VARIANT := $(if $(SAN),san-$(SAN),$(if $(DEBUG),debug,release))
BUILD := build/$(VARIANT)
Q := $(if $(V),,@)
CC := gcc

WARN := -Wall -Wextra -Werror -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla \
  -Wwrite-strings -Wformat=2 -Wundef -Wswitch-enum
HARDEN := -D_FORTIFY_SOURCE=2 -fstack-protector-strong
CFLAGS_ALL := -std=gnu11 -g -fPIC -pthread -I. -D_GNU_SOURCE -ffp-contract=off -fno-math-errno $(WARN)
LDFLAGS_ALL := -pthread -Wl,-z,relro,-z,now
ifneq ($(SAN),)
  CFLAGS_ALL += -O1 -fno-omit-frame-pointer -fsanitize=$(SAN) $(if $(filter undefined,$(SAN)),-fno-sanitize-recover=all)
  LDFLAGS_ALL += -fsanitize=$(SAN)
else ifneq ($(DEBUG),)
  CFLAGS_ALL += -O0
else
  CFLAGS_ALL += -O2 $(HARDEN)
endif
CFLAGS_ALL += $(CFLAGS)
# Numeric kernels: worth -O3, and still without contraction or reassociation, so that bits agree between machines.
KERNEL_CFLAGS := $(if $(SAN)$(DEBUG),,-O3)

LIBS := -lwebsockets -lcurl -lyaml -lcjson -lopenblas -lsqlite3 -lssl -lcrypto -lz -lm

# A component is all sources below its folder; main_*.c are programs.
sources = $(shell find $(1) -name '*.c' ! -name 'main_*.c' 2>/dev/null | LC_ALL=C sort)
objects = $(patsubst %.c,$(BUILD)/obj/%.o,$(1))

COMPONENTS := common syncer worker operator sim
$(foreach c,$(COMPONENTS),$(eval SRC_$(c) := $(call sources,$(c))))
LIB_SRC := $(call sources,worker/link) $(SRC_common)

PROGRAM_SRC := $(shell find $(COMPONENTS) -name 'main_*.c' | LC_ALL=C sort)
program_name = $(BUILD)/bin/$(subst _,-,$(patsubst main_%.c,%,$(notdir $(1))))
PROGRAMS := $(foreach p,$(PROGRAM_SRC),$(call program_name,$(p)))

UNIT_SRC := $(sort $(wildcard tests/unit/test_*.c))
UNIT_BIN := $(patsubst tests/unit/test_%.c,$(BUILD)/unit/%,$(UNIT_SRC))
BENCH_SRC := $(sort $(wildcard tests/bench/bench_*.c))
BENCH_BIN := $(patsubst tests/bench/bench_%.c,$(BUILD)/bench/%,$(BENCH_SRC))
TOOL_SRC := $(sort $(wildcard tests/integration/tool_*.c))
TOOL_BIN := $(patsubst tests/integration/tool_%.c,$(BUILD)/tools/%,$(TOOL_SRC))

INTEGRATION := $(sort $(wildcard tests/integration/test_*.py tests/integration/test_*.sh))

ARCHIVES := $(foreach c,$(COMPONENTS),$(if $(SRC_$(c)),$(BUILD)/lib/$(c).a))

.PHONY: all programs library help deps demo test unit integration sanitize test-compat bench bench-baseline bench-deps experiment experiment-long lint lint-selftest manifests \
  bench-operator images test-cluster demo-cluster install clean FORCE
all: programs library
programs: $(PROGRAMS)
library: $(BUILD)/lib/libdiloco.a $(BUILD)/lib/libdiloco.so

help:
	@sed -n '1,/^$$/s/^#$$//;1,/^SHELL/s/^# //p' Makefile

# --- compiling -----------------------------------------------------------------------------------------------------------

# Objects depend on the flags that they were built with.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(CFLAGS_ALL) $(KERNEL_CFLAGS)' | cmp -s - $@ || echo '$(CC) $(CFLAGS_ALL) $(KERNEL_CFLAGS)' > $@

# Kernels are named by their folder.
$(BUILD)/obj/syncer/merge/%.o $(BUILD)/obj/common/codec%.o $(BUILD)/obj/worker/model/%.o: KERNEL := $(KERNEL_CFLAGS)

$(BUILD)/obj/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo "  CC   $<"
	$(Q)$(CC) $(CFLAGS_ALL) $(KERNEL) -MMD -MP -c -o $@ $<

define archive_rule
$(BUILD)/lib/$(1).a: $(call objects,$(SRC_$(1)))
	@mkdir -p $$(@D)
	@rm -f $$@
	$$(Q)ar rcsD $$@ $$^
endef
$(foreach c,$(COMPONENTS),$(eval $(call archive_rule,$(c))))

$(BUILD)/lib/libdiloco.a: $(call objects,$(LIB_SRC))
	@mkdir -p $(@D)
	@rm -f $@
	$(Q)ar rcsD $@ $^

# Only the public functions (diloco_*) are visible from outside the shared library.
$(BUILD)/lib/libdiloco.so: $(call objects,$(LIB_SRC)) worker/link/libdiloco.map
	@mkdir -p $(@D)
	$(Q)$(CC) -shared $(LDFLAGS_ALL) -Wl,--version-script=worker/link/libdiloco.map -Wl,-soname,libdiloco.so.0 -o $@ \
	  $(call objects,$(LIB_SRC)) -lssl -lcrypto -lyaml -lcjson -lm
	$(Q)ln -sf libdiloco.so $@.0 # Under the name that programs load, so that they also start with this folder.

define program_rule
$(call program_name,$(1)): $(call objects,$(1)) $(ARCHIVES)
	@mkdir -p $$(@D)
	@echo "  LD   $$@"
	$$(Q)$(CC) $(LDFLAGS_ALL) $(if $(SAN),,-pie) -o $$@ $$< -Wl,--as-needed -Wl,--start-group $(ARCHIVES) -Wl,--end-group $(LIBS)
endef
$(foreach p,$(PROGRAM_SRC),$(eval $(call program_rule,$(p))))

define test_binary
	@mkdir -p $(@D)
	@echo "  LD   $@"
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $< -Wl,--as-needed -Wl,--start-group $(ARCHIVES) -Wl,--end-group $(LIBS) -lcunit
endef
# Allocations that fail: of all that is linked in.
ALLOCATIONS := malloc calloc realloc aligned_alloc strdup strndup asprintf __asprintf_chk
$(BUILD)/unit/kube_memory $(BUILD)/unit/memory: LDFLAGS_ALL += $(ALLOCATIONS:%=-Wl,--wrap=%)
$(BUILD)/unit/%: $(BUILD)/obj/tests/unit/test_%.o $(ARCHIVES)
	$(test_binary)
$(BUILD)/bench/%: $(BUILD)/obj/tests/bench/bench_%.o $(ARCHIVES)
	$(test_binary)
$(BUILD)/tools/%: $(BUILD)/obj/tests/integration/tool_%.o $(ARCHIVES)
	$(test_binary)

.SECONDARY:
-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)

# --- running -------------------------------------------------------------------------------------------------------------

deps:
	@tests/deps.sh

JOB ?= crds/samples/demo.yaml
# A learner is killed at 35 % of the token budget and one more joins at 55 %.
DEMO_CHAOS := kill@35%:2,join@55%
demo:
	@tests/deps.sh build demo
	@$(MAKE) --no-print-directory -j$$(nproc) programs
	@mkdir -p build/results
	$(BUILD)/bin/diloco run $(JOB) --chaos $(DEMO_CHAOS) --results build/results/demo.json --sample "The word "

# Under the thread sanitizer: the programs that have threads.
THREADED := blas diloco diloco_refused diloco_trouble example gemm generate intake jobs kernels link_io local merge merge_bits model model_steps peers pool push server server_loop store store_draft train
ifeq ($(SAN),thread)
  UNIT_BIN := $(filter $(THREADED:%=$(BUILD)/unit/%),$(UNIT_BIN))
endif
unit: $(UNIT_BIN)
	@tests/run_unit.sh $(BUILD) $(UNIT_BIN)

integration: programs library $(TOOL_BIN)
	@tests/run_integration.sh $(BUILD) $(INTEGRATION)

test:
	@tests/deps.sh
	@tests/run_all.sh

sanitize:
	@for san in address undefined thread; do \
	  echo "$$san sanitizer"; $(MAKE) --no-print-directory -j$$(nproc) SAN=$$san unit || exit 1; done

lint:
	@tests/deps.sh build test lint
	@tests/lint/lint.sh

lint-selftest:
	@tests/deps.sh build test lint
	@tests/lint/selftest.sh

# The environment is made by the test itself when it is missing.
test-compat bench-deps: $(TOOL_BIN)
	@tests/deps.sh build test
	@tests/compat/test_transformers.sh --build $(BUILD)

# One that fails is named, and the others go on.
ONLY ?=
BENCH_WANTED := $(if $(ONLY),$(ONLY),$(BENCH_BIN:$(BUILD)/bench/%=%) recovery)
BENCH_RUN := $(patsubst %,$(BUILD)/bench/%,$(filter-out recovery,$(BENCH_WANTED)))
bench bench-baseline: programs library $(BENCH_RUN) $(TOOL_BIN)
	@mkdir -p build/results
	@for bench in $(BENCH_RUN); do \
	  name=$$(basename $$bench); echo "== $$name"; $$bench || echo "FAILED: $$name; what is left are figures of an earlier run"; done
	@$(if $(filter recovery,$(BENCH_WANTED)),echo "== recovery"; \
	  /usr/bin/python3 tests/bench/bench_recovery.py --build $(BUILD) || echo "FAILED: recovery")
	@/usr/bin/python3 tests/bench/collect.py build/results --baseline tests/bench/baseline.json --only $(ONLY) \
	  $(if $(filter %-baseline,$@)$(filter write,$(BASELINE)),--write --document docs/performance.md)

bench-operator: programs
	@tests/deps.sh build test cluster
	@/usr/bin/python3 tests/cluster/bench/run_operator.py --build $(BUILD) $(if $(YARDSTICK),--yardstick)

experiment experiment-long: programs
	@tests/deps.sh build demo test
	@/usr/bin/python3 tests/experiment/experiment.py --build $(BUILD) --plan $(if $(filter %-long,$@),long,quick)

# Helm is one of the tools of the test cluster; any other of version 3 does too.
HELM ?= $(shell tests/cluster/build_tools.sh --where)/helm
CHART_CRD := helm/diloco/files/decoupleddilocojobs.yaml
manifests: $(BUILD)/tools/spec
	$(BUILD)/tools/spec crd > crds/decoupleddilocojobs.yaml
	$(BUILD)/tools/spec reference > docs/job-reference.md
	cp crds/decoupleddilocojobs.yaml $(CHART_CRD)
	$(HELM) template diloco helm/diloco --namespace diloco-system --kube-version 1.36.0 --set plainManifests=true \
	  > $(BUILD)/install.yaml
	mv $(BUILD)/install.yaml helm/install.yaml

IMAGE_PREFIX ?= localhost
IMAGE_TAG ?= dev
images: programs
	@images/build_oci.py --build $(BUILD) --prefix $(IMAGE_PREFIX) --tag $(IMAGE_TAG)

# The programs in the images are those of the address sanitizer's variant, unless SAN says otherwise.
CLUSTER_SAN := $(or $(SAN),address)
test-cluster:
	@tests/deps.sh build demo test cluster
	@$(MAKE) --no-print-directory -j$$(nproc) SAN=$(CLUSTER_SAN) IMAGE_TAG=test images build/san-$(CLUSTER_SAN)/tools/kube_api
	@tests/cluster/run.py --build build/san-$(CLUSTER_SAN)

demo-cluster:
	@tests/deps.sh build demo cluster
	@$(MAKE) --no-print-directory -j$$(nproc) images
	@tests/cluster/demo.py --build $(BUILD)

install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib $(DESTDIR)$(PREFIX)/include
	install -m 755 $(PROGRAMS) $(DESTDIR)$(PREFIX)/bin
	ln -sf diloco $(DESTDIR)$(PREFIX)/bin/kubectl-diloco
	install -m 644 $(BUILD)/lib/libdiloco.a $(DESTDIR)$(PREFIX)/lib
	install -m 755 $(BUILD)/lib/libdiloco.so $(DESTDIR)$(PREFIX)/lib/libdiloco.so.0
	ln -sf libdiloco.so.0 $(DESTDIR)$(PREFIX)/lib/libdiloco.so
	install -m 644 worker/link/diloco.h $(DESTDIR)$(PREFIX)/include
	@[ -n "$(DESTDIR)" ] || ldconfig 2> /dev/null || true # So that programs find libdiloco.so at once.

clean:
	rm -rf build
