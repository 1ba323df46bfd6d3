"""Check a forest that is trained in a separate process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from contextlib import suppress

import numpy as np
import psutil
import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.strategies.dynpipe.interference.features import NAMES
from lightning_pipes.strategies.dynpipe.interference.forest import train
from lightning_pipes.strategies.dynpipe.interference.refit import ForestTraining


def numbers(count: int = 40):
    random = np.random.default_rng(0)
    return random.random((count, len(NAMES))), random.random(count)


def test_the_forest_is_that_of_one_process():
    data, logs = numbers()
    training = ForestTraining(data, logs, 4)
    found, here = training.result(), train(data, logs, NAMES, trees=4)
    np.testing.assert_array_equal(found.predict(data), here.predict(data))
    assert training._process.returncode == 0


def test_its_last_words_come_back():
    data, logs = numbers()
    with pytest.raises(
        InputError, match=r"the process that trains it failed: training needs .*got \(40, 33\) and \(39,\)"
    ):
        ForestTraining(data, logs[:-1], 4).result()


def test_it_ends_with_the_process_that_started_it():
    code = """
        import numpy as np, os
        from lightning_pipes.strategies.dynpipe.interference.refit import ForestTraining
        from lightning_pipes.strategies.dynpipe.interference.features import NAMES
        random = np.random.default_rng(0)
        training = ForestTraining(random.random((5000, len(NAMES))), random.random(5000), 10**6)
        training._told.join()
        print(training._process.pid, flush=True)
        os._exit(0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(timeout=60)  # raises if the process is still running then
