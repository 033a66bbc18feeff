"""How pytest runs the tests, and fixtures of all of them.

Only processes that run tests import PyTorch and fairseq. With several of them, the process that distributes the tests
needs neither.
"""

import gc
import importlib.util
import logging
import signal

import pytest
from helpers.toy import checkpoints, data, exported_run, run  # noqa: F401  (fixtures, made once in each process)


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="no slow test, and every other one with its first parameters only"
    )


def pytest_configure(config):
    # A shell's background job ignores Ctrl-C, and so would the programs that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        from helpers.interpreter import import_triton

        import_triton()  # before anything else lets PyTorch do it
        if importlib.util.find_spec("fairseq"):  # core/ and huggingface/ need none
            import helpers.models  # noqa: F401

        gc.set_threshold(70_000, 20, 20)  # looking for circles of garbage takes a tenth of a short test


def pytest_collection_finish(session):
    gc.freeze()  # the libraries and the tests themselves are looked at by no collection


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.name != "test_docs_run.py")  # one test of minutes: the last would wait for it
    if config.getoption("--quick"):
        first = {}
        for item in items:
            if not item.get_closest_marker("slow"):
                first.setdefault((item.path, getattr(item, "originalname", item.name)), item)
        config.hook.pytest_deselected(items=[item for item in items if item not in first.values()])
        items[:] = first.values()


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def logging_as_before():
    """Commands that run in this process, in fixtures of a module too, make its logs quiet; the next test needs them."""
    fairseq_logs = logging.getLogger("fairseq")
    level = fairseq_logs.level
    logging.disable(logging.NOTSET)
    yield
    fairseq_logs.setLevel(level)


@pytest.fixture(params=["kernel", "plain"])
def each_way(request, monkeypatch):
    """Once by the CPU's kernel, once by the plain composition: promises hold on both."""
    from helpers.models import small_call

    from evolving_attention import kernels

    if request.param == "plain":
        monkeypatch.setattr(kernels, "kernel_for", lambda call: None)
    else:
        assert kernels.cpu.refuses(small_call()) is None, "no kernel to test: is there a C compiler?"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Binary data: sentences of 1 to 9 words, to be turned round."""
    from helpers.other_models import preprocess, reversed_pair

    languages = ["-s", "de", "-t", "en", "--joined-dictionary"]
    return preprocess(
        tmp_path_factory.mktemp("data") / "corpus", reversed_pair, *languages, train=200, valid=30, test=10
    )
