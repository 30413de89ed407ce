# The two commands of the README, and a few for those who work on Jackfield.
.PHONY: quickstart test wheels develop check format docs constraints references benchmark-peers benchmark-transfer-queue vllm-environment sglang-environment clean

PYTHON = .venv/bin/python

quickstart: ## install the first plugins and watch a language model get better at a task
	@python3 tools/environment.py quickstart
	$(PYTHON) examples/quickstart/quickstart.py $(ARGS)

test: ## everything that CI runs
	@bash .ci/run

wheels: ## build all wheels into dist/ and install them
	@python3 tools/ci.py environment wheels

develop: ## install the tools and every package, editable
	@python3 tools/environment.py develop

check: develop ## what needs no test run: lint, types, imports, contracts, docs
	@python3 tools/ci.py lint format imports types abi references docs

format: develop ## lay out the code
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs: develop ## build the documentation into build/docs
	@python3 tools/ci.py docs

constraints: develop ## write the versions that are installed to constraints.txt
	$(PYTHON) tools/constraints.py

references: develop ## write the pages of the documentation that are generated
	@for tool in tools/*_reference.py; do $(PYTHON) $$tool || exit 1; done

benchmark-peers: develop ## install what benchmarks compare with into .venv
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --requirement benchmarks/requirements.txt

benchmark-transfer-queue: ## install TransferQueue into an environment of its own, which its benchmark finds
	python3 -m venv .venv-transfer-queue
	.venv-transfer-queue/bin/python -m pip install --quiet --requirement benchmarks/requirements-transfer-queue.txt

vllm-environment: develop ## make the environment in which tests run vLLM: 6 minutes and 3.5 GB
	.venv/bin/jackfield env create vllm plugins/rollout/vllm/tests/environment.yaml

sglang-environment: ## make the environment in which a test compares requests with SGLang's types
	python3 -m venv environments/sglang
	environments/sglang/bin/python -m pip install --quiet --requirement plugins/rollout/sglang/tests/requirements.txt
	environments/sglang/bin/python -m pip install --quiet --no-deps sglang==0.5.23

clean: ## remove what was made: environments, wheels, caches
	rm -rf .venv .venv-transfer-queue .tox dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
