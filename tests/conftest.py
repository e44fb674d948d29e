"""Every test runs against a stand-in Hub, with a cache of its own and no token: none can reach the real one."""

import gc
import os
import shutil
import signal
import tempfile
import time

from tests.support.hub import FakeHub

gc.disable()  # until all is imported
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore ctrl-C, and so would ours
HUB = FakeHub()
os.environ.update(
    HF_ENDPOINT=HUB.url,
    HF_HOME=(home := tempfile.mkdtemp(prefix="linearizer-tests-")),
    LINEARIZER_QUEUE=f"{home}/queue",  # tests that run side by side do not wait for each other
    HF_HUB_DISABLE_XET="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    OMP_NUM_THREADS="1",  # tiny models are fastest so, and a test and the processes it starts compute the same bits
    TOKENIZERS_PARALLELISM="false",
)
for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "LINEARIZER_KERNELS", "SPACE_ID", "LINEARIZER_RUNS"):
    os.environ.pop(name, None)

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are read where they are defined, and then run by numpy

import hypothesis  # noqa: E402
import pytest  # noqa: E402  (huggingface_hub reads the environment when it is imported, and pytest's plugins may)

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
LONGEST = """page/test_on_space page/test_journey page cli workers publish student encoders test_ benchmarks train
evaluate kernels run serve teacher hub method""".split()
ONE_SERVER = "access api encoders evaluation hub_jobs journey landing steps"  # and one browser, long to start
OF_ONE_SERVER = {f"tests/page/test_{name}.py" for name in ONE_SERVER.split()}


@pytest.fixture
def hub():
    """Return the stand-in Hub, empty."""
    HUB.clear()
    return HUB


@pytest.fixture
def said(capsys):
    """Run the command line; return its exit code, standard output and standard error."""

    def ask(*arguments):
        from linearizer.cli.main import main

        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return ask


@pytest.fixture
def slept(monkeypatch):
    """Replace sleep by a list of the seconds it was asked for."""
    result = []
    monkeypatch.setattr(time, "sleep", result.append)
    return result


@pytest.fixture
def judged_briefly(monkeypatch):
    """Evaluate students of this process on two texts."""
    from dataclasses import replace

    from linearizer import pipeline
    from linearizer.evaluate import evaluate_run

    brief = replace(evaluate_run.JUDGING, texts=2)
    for module in (evaluate_run, pipeline):
        monkeypatch.setattr(module, "JUDGING", brief)


@pytest.fixture(scope="session")
def tokenizer():
    """Load the tokenizer of the demo model, which no test may change."""
    from linearizer.hub.models import find_model
    from linearizer.teacher.load import load_tokenizer

    return load_tokenizer(find_model("demo"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """Save a tiny model with two shards, and return its folder, which no test may change."""
    from transformers import AutoModelForCausalLM

    from tests.support.families import tiny_config

    folder = tmp_path_factory.mktemp("tiny") / "llama"
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.save_pretrained(folder, max_shard_size="300KB")
    (folder / "README.md").write_text("---\nlicense: mit\n---\nA tiny model.\n")
    return folder


@pytest.fixture(scope="session")
def quick_run(tmp_path_factory):
    """Return the folder of a finished run of the demo model, which no test may change."""
    return made_once(tmp_path_factory, "quick-run", "--texts 2 --length 64 --steps 0")


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """Return the folder of a finished run of the demo model that was trained, which no test may change."""
    return made_once(tmp_path_factory, "trained-run", "--texts 2 --length 128 --steps 2")


@pytest.fixture(scope="session")
def sentence_encoder(tmp_path_factory):
    """Return the folder of a small sentence encoder, which no test may change."""
    from tests.support.encoders import write_sentence_encoder

    return write_sentence_encoder(tmp_path_factory.mktemp("encoder") / "sentences")


@pytest.fixture(scope="session")
def topics(tmp_path_factory):
    """Name a source of text that this encoder can tell apart."""
    from tests.support.encoders import write_topics

    return write_topics(tmp_path_factory.mktemp("topics") / "words.jsonl")


def made_once(tmp_path_factory, name, options):
    """Make a run with features in a folder shared by all workers, unless a worker has made it."""
    from filelock import FileLock

    from linearizer.cli.main import main

    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name / "demo"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.parent / "lock"):
        if not (folder / "checkpoint").is_dir():
            words = f"run demo --budget 64 --recipe features --dtype float32 {options} --out".split()
            assert main([*words, str(folder)]) == 0
    return folder


def pytest_xdist_auto_num_workers():
    """Run one worker more than there are cores: many tests wait for processes, pages and clocks."""
    return (os.cpu_count() or 1) + 1


def pytest_xdist_make_scheduler(config, log):
    """Assign whole files to each worker, and files that share a server of the page to one worker."""
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return ONE_SERVER if file in OF_ONE_SERVER else file

    return ByServer(config, log)


def pytest_collection_modifyitems(items):
    """Run the longest tests first, so that all workers end together."""
    paths = [*(f"tests/{path}" for path in LONGEST), ""]
    items.sort(key=lambda item: next(place for place, path in enumerate(paths) if item.nodeid.startswith(path)))


def pytest_collection_finish():
    """Keep imported objects out of garbage collection, which would traverse them again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    """Remove the Hub cache of this run."""
    gc.unfreeze()  # libraries report as leaks what they cannot free at the end
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
