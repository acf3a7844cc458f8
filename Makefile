.PHONY: test unit lint lab down bench
test:
	sh tests/run.sh
unit:
	sh tests/run.sh unit
lint:
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports
lab:
	sh docker/lab.sh
down:
	sh docker/lab.sh down
bench:
	.venv/bin/python tests/bench/converge.py
	.venv/bin/python tests/bench/download.py
	.venv/bin/python tests/bench/hostcopy.py
