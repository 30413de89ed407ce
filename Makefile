# The two commands of the README, and a few for those who work on Jackfield.
.PHONY: quickstart real-model test nightly wheels develop check format docs constraints references screenshots benchmark-peers benchmark-transfer-queue interpreters gpu gpu-wheels clean

PYTHON = .venv/bin/python

quickstart: ## install the first plugins and watch a language model get better at a task
	@python3 tools/environment.py quickstart
	$(PYTHON) examples/quickstart/quickstart.py $(ARGS)

real-model: ## SFT, then GRPO with LoRA: SmolLM2-135M on GSM8K, which is downloaded, or lies in the folder GSM8K=…
	@python3 tools/environment.py quickstart
	$(PYTHON) examples/real_model/real_model.py $(if $(GSM8K),--data $(GSM8K)) $(ARGS)

test: ## everything that CI runs
	@bash .ci/run

nightly: ## everything that CI runs, and the full matrices that it leaves out
	@bash .ci/run --nightly

wheels: ## build all wheels into dist/ and install them
	@python3 tools/ci.py environment wheels

develop: ## install the tools and every package, editable
	@python3 tools/environment.py develop

check: develop ## what needs no test run: lint, types, imports, contracts, docs
	@python3 tools/ci.py size lint format imports types abi references docs

format: develop ## lay out the code
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs: develop ## build the documentation into build/docs
	@python3 tools/ci.py docs

constraints: develop ## write the versions that are installed to constraints.txt
	$(PYTHON) tools/constraints.py

references: develop ## write the pages of the documentation that are generated
	@for tool in tools/*_reference.py; do $(PYTHON) $$tool || exit 1; done

screenshots: develop ## make the screenshots of the documentation again; needs Debian's chromium, and what make quickstart has left
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --requirement tools/screenshots-requirements.txt
	$(PYTHON) tools/screenshots.py

benchmark-peers: develop ## install what benchmarks compare with into .venv
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --requirement benchmarks/requirements.txt

benchmark-transfer-queue: ## install TransferQueue into an environment of its own, which its benchmark finds
	python3 -m venv .venv-transfer-queue
	.venv-transfer-queue/bin/python -m pip install --quiet --requirement benchmarks/requirements-transfer-queue.txt

interpreters: develop ## make the environments in which tests run what does not install beside Jackfield: minutes, 9 GB
	@python3 tools/environment.py interpreters

gpu: ## conformance, weights, a GRPO run and speed on a machine with CUDA; nothing is installed (docs/guides/gpu.md)
	python3 tools/gpu.py $(ARGS)

gpu-wheels: ## download what a GPU machine without a package index may lack into .gpu-wheels
	python3 tools/gpu.py --collect

clean: ## remove what was made: environments, wheels, caches
	rm -rf .venv .venv-transfer-queue .gpu-wheels .tox environments dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
