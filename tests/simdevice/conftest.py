"""The fixture `sim`, and the conditions under which these tests can run.

They need g++ and ninja, and a process of their own, since the device is registered for the whole process:
`python -m pytest tests/simdevice`.
"""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from build import missing_tools  # noqa: E402

torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "expect_race: the test makes races; the fixture `sim` does not fail it for them")


def _has_own_process(config):
    arguments = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    return all(argument == HERE or HERE in argument.parents for argument in arguments)


class _NotImported(pytest.Module):
    """A file of this folder that cannot run here: importing it would build and register the device."""

    def collect(self):
        if not _has_own_process(self.config):
            pytest.skip("needs a process of its own: python -m pytest tests/simdevice", allow_module_level=True)
        reason = f"needs {' and '.join(missing_tools())} to build the simulated device"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if missing_tools() or not _has_own_process(parent.config):
        return _NotImported.from_parent(parent, path=module_path)
    return None


def pytest_collection_finish(session):
    if _has_own_process(session.config):
        gc.collect()
        gc.freeze()  # what is there now stays; the collections below need not look at it


@pytest.fixture
def sim(request):
    """The simulated device, as after a start: lazy, without a limit, without a clock. Fails the test for its races."""
    import backend

    gc.collect()  # what earlier tests have left in cycles would die amid this one, and free memory that it counts
    backend.configure()
    backend.set_limit()
    backend.set_pinned_limit()
    backend.reset()
    yield backend
    backend.configure()
    found = backend.races()
    backend.reset()
    if not request.node.get_closest_marker("expect_race"):
        assert not found, "\n".join(found)
