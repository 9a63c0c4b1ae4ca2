"""Environment of every test. Set before the first import of a Hugging Face library: these are read at import."""

import gc
import os
import signal


os.environ["HF_HUB_OFFLINE"] = "1"  # a test that would reach the network fails at once instead
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizers warn after every fork otherwise
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # one notice per trainer with an environment otherwise
# The models are tiny: two threads that wait for each other are no faster, and twenty times slower on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CI", "true")  # TRL sends no telemetry, hypothesis sets no deadlines

# A shell lets what it starts in the background ignore Ctrl-C, which some tests send
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session):
    # Every training ends with a full garbage collection, most of it over what the imports left
    gc.freeze()
