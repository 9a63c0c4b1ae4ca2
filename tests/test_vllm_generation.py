"""vLLM's generators against an engine and a server that are scripted: what they ask for, and what they make of it."""

import math
import resource
import signal
import threading
import types

import pytest
import requests
import torch
from accelerate import Accelerator
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

import fake_vllm
from toys import chat_dataset, generation_batch, make_model, make_tokenizer, usual
from toys import make_trainer as make_real_trainer
from trace_trl import StepResult
from trace_trl.generation import Request, make_backend
from trace_trl.vllm_generation import ServerGenerator, _uninterrupted, keep_connections, most_connections


TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id
WORDS = sorted({token for word in "red green blue yes no".split() for token in usual(TOKENIZER, word)})
ECHO = fake_vllm.Echo(WORDS, END)
REQUESTS = [Request([1, 2, 3], 20), Request([4], 3), Request([1, 2, 3], 20), Request([5, 6], 7)]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    fake_vllm.install(monkeypatch)


def make(mode="colocate", stop=None, say=ECHO, **options):
    trainer = fake_vllm.make_trainer(say, END, Accelerator(cpu=True), TOKENIZER, mode, **options)
    return make_backend(trainer, stop), trainer


def expected(request):
    return ECHO(request.context, request.max_new_tokens)[0]


# Requests and samples


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_every_request_gets_its_own_limit_and_the_turn_of_its_own_context(mode):
    generate, _ = make(mode)
    with generate.session():
        samples = generate(REQUESTS)
    assert [sample.token_ids for sample in samples] == [expected(request) for request in REQUESTS]
    assert [sample.finish for sample in samples] == ["eos", "length", "eos", "eos"]
    for sample in samples:
        assert sample.logprobs == [-1.0 - place for place in range(len(sample.token_ids))]
    assert sum(sample.cached_tokens for sample in samples) == sum(len(r.context) // 2 for r in REQUESTS)


def test_sampling_parameters_of_a_request():
    generate, trainer = make(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, generation_kwargs={"min_tokens": 5}
    )
    generate(REQUESTS)
    params = trainer.vllm_generation.llm.llm_engine.params
    assert [p.max_tokens for p in params] == [20, 3, 20, 7]
    # More tokens than a turn may have can't be asked of it
    assert [p.min_tokens for p in params] == [5, 3, 5, 5]
    for p in params:
        assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty) == (1, 0.7, 0.9, 5, 0.1, 1.1)
        assert p.logprobs == 0 and p.stop_token_ids == [END] and not p.detokenize
        assert p.output_kind is fake_vllm.RequestOutputKind.FINAL_ONLY and not hasattr(p, "stop")


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_stop_strings_are_asked_for_and_stay_part_of_the_turn(mode):
    red = usual(TOKENIZER, "red")

    def say(context, limit):
        return red[:limit], "stop" if limit >= len(red) else "length"

    generate, trainer = make(mode, stop=["d"], say=say)
    if mode == "colocate":
        engine = trainer.vllm_generation.llm.llm_engine
        step = engine.step

        def stepping():
            outputs = step()
            for output in outputs:
                output.outputs[0].stop_reason = "d"
            return outputs

        engine.step = stepping
    (sample,) = generate([Request([1], 9)])
    assert sample.token_ids == red and sample.finish == "stop"
    wanted = {
        "stop": ["d"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "stop_token_ids": [END],
    }
    if mode == "colocate":
        assert wanted.items() <= vars(engine.params[0]).items() and engine.params[0].detokenize
    else:
        (call,) = trainer.vllm_generation.vllm_client.calls
        assert call["generation_kwargs"] == wanted


def test_structured_outputs():
    for options, wanted in (
        ({"structured_outputs_regex": "a+"}, fake_vllm.StructuredOutputsParams(regex="a+")),
        ({"generation_kwargs": {"structured_outputs": {"json": "{}"}}}, fake_vllm.StructuredOutputsParams(json="{}")),
    ):
        generate, trainer = make(**options)
        generate(REQUESTS[:1])
        assert trainer.vllm_generation.llm.llm_engine.params[0].structured_outputs == wanted
    generate, trainer = make("server", structured_outputs_regex="a+")
    generate(REQUESTS[:1])
    assert trainer.vllm_generation.vllm_client.calls[0]["structured_outputs_regex"] == "a+"


def test_a_turn_that_vllm_gave_up_is_an_error():
    generate, _ = make(say=lambda context, limit: ([], "abort"))
    with pytest.raises(RuntimeError, match="finish reason 'abort'"):
        generate(REQUESTS[:1])


def test_a_model_without_prefix_cache_is_told_of(caplog):
    trainer = fake_vllm.make_trainer(ECHO, END, Accelerator(cpu=True))
    trainer.vllm_generation.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching = False
    make_backend(trainer)
    assert "caches no prefixes" in caplog.text


# A server


def test_a_server_is_asked_once_for_each_limit():
    generate, trainer = make("server")
    generate(REQUESTS)
    calls = trainer.vllm_generation.vllm_client.calls
    assert sorted((call["max_tokens"], len(call["prompts"])) for call in calls) == [(3, 1), (7, 1), (20, 2)]
    assert all(call["n"] == 1 and call["logprobs"] == 0 for call in calls)


def test_a_server_is_asked_for_all_turns_at_once():
    """Each has a limit of its own, so each is a request of its own: 64 of them left a large server idle."""
    generate, trainer = make("server")
    client = trainer.vllm_generation.vllm_client
    answer, here = client.generate, threading.Barrier(200, timeout=60)

    def together(**options):
        here.wait()
        return answer(**options)

    client.generate = together
    asked = [Request([limit], limit) for limit in range(1, 201)]
    assert [sample.token_ids for sample in generate(asked)] == list(map(expected, asked))


def test_a_server_keeps_its_connections_and_is_asked_again_as_before():
    session = requests.Session()
    retries = Retry(total=7)
    session.mount("https://", HTTPAdapter(max_retries=retries))
    keep_connections(session, 300)
    for scheme, total in (("http://a", 0), ("https://a", 7)):
        adapter = session.get_adapter(scheme)
        assert adapter.max_retries.total == total
        assert adapter._pool_maxsize == 300


@pytest.mark.parametrize(("files", "connections"), [(65536, 1024), (1024, 256), (100, 25), (2, 1)])
def test_connections_leave_files_to_others(monkeypatch, files, connections):
    """At the usual limit of 1,024 open files, as many connections left none to checkpoints and environments."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: {resource.RLIMIT_NOFILE: (files, 10**6)}[which])
    assert most_connections() == connections
    _, trainer = make("server")
    assert trainer.vllm_generation.vllm_client.session.get_adapter("http://a")._pool_maxsize == connections


def test_a_server_that_mixes_prompts_up_is_an_error():
    generate, trainer = make("server")
    client = trainer.vllm_generation.vllm_client
    answer = client.generate
    client.generate = lambda prompts, **options: answer(prompts[::-1], **options)
    with pytest.raises(RuntimeError, match="other prompts"):
        generate([REQUESTS[0], Request([7, 8], 20)])


def test_a_logprob_that_a_server_could_not_give_is_nan():
    generate, trainer = make("server")
    client = trainer.vllm_generation.vllm_client
    answer = client.generate

    def without(**options):
        result = answer(**options)
        result["logprobs"][0][0] = [None]
        return result

    client.generate = without
    (sample,) = generate(REQUESTS[:1])
    assert math.isnan(sample.logprobs[0]) and not math.isnan(sample.logprobs[1])


@pytest.mark.parametrize("text", ["", "nothing here", None])
def test_a_server_that_does_not_tell_of_its_cache(text):
    generate, trainer = make("server")

    def get(url, timeout):
        if text is None:
            raise ConnectionError
        return types.SimpleNamespace(text=text)

    trainer.vllm_generation.vllm_client.session.get = get
    assert {sample.cached_tokens for sample in generate(REQUESTS)} == {None}
    assert isinstance(generate, ServerGenerator) and generate.context_length == 4096


# Weights, sleep


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_weights_are_pushed_once_per_optimizer_step(mode):
    generate, trainer = make(mode)
    for step in (0, 0, 1, 1, 1, 2):
        trainer.state.global_step = step
        with generate.session():
            generate(REQUESTS)
    assert trainer.vllm_generation.llm.log == ["sync"] * 3
    if mode == "colocate":
        assert trainer.vllm_generation.llm.llm_engine.resets == 3


def test_a_prefix_cache_that_stays_full_of_old_weights_is_an_error():
    generate, trainer = make()
    trainer.vllm_generation.llm.llm_engine.can_reset = False
    with pytest.raises(RuntimeError, match="could not empty its prefix cache"), generate.session():
        pass


def test_asleep_between_generations():
    generate, trainer = make(enable_sleep_mode=True)
    for _ in range(2):
        with generate.session():
            # One wake for all rounds: asleep it would forget weights and cached prefixes
            generate(REQUESTS)
            generate(REQUESTS)
    assert trainer.vllm_generation.llm.log == ["sync", "wake kv_cache", "sleep 2"] * 2
    with pytest.raises(KeyError), generate.session():
        raise KeyError
    assert trainer.vllm_generation.llm.log[-1] == "sleep 2"


# Aborts


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["add_request", "step"])
def test_an_error_takes_every_request_back(place, error):
    generate, trainer = make()
    engine = trainer.vllm_generation.llm.llm_engine
    function, calls = getattr(engine, place), []

    def failing(*args):
        calls.append(None)
        if len(calls) == 3:
            raise error()
        return function(*args)

    setattr(engine, place, failing)
    engine.random.seed(3)
    with pytest.raises(error):
        generate(REQUESTS)
    assert not engine.waiting and not generate.is_busy
    setattr(engine, place, function)
    assert [sample.token_ids for sample in generate(REQUESTS)] == [expected(request) for request in REQUESTS]


def test_what_a_session_leaves_open_is_taken_back():
    generate, trainer = make()
    with generate.session():
        generate.submit([("a", REQUESTS[0]), ("b", REQUESTS[1])])
        assert generate.is_busy
    assert not trainer.vllm_generation.llm.llm_engine.waiting and not generate.is_busy


def test_ctrl_c_waits_for_the_step_to_end():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with _uninterrupted():
            signal.raise_signal(signal.SIGINT)  # to this thread, before it goes on
            done.append("step")
        done.append("behind")
    assert done == ["step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Trainers


def speaking(monkeypatch, tmp_path, **options):
    """A trainer whose vLLM says what its context is."""
    fake = type("Fake", (fake_vllm.FakeVLLMGeneration,), {"say": staticmethod(ECHO)})
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", fake)

    def env_step(state, action, messages):
        return StepResult(observation="go on", done=len(messages) > 4)

    defaults = {"per_device_train_batch_size": 12, "num_generations": 6, "continuations_per_root": 2}
    defaults |= {"max_completion_length": 60, "max_turn_length": 10, "use_vllm": True, "env_step": env_step}
    model = make_model()
    model.name_or_path = "a folder"
    return make_real_trainer(tmp_path, model=model, dataset=chat_dataset(), **(defaults | options))


@pytest.mark.parametrize("mode", ["continuous", "lockstep"])
def test_a_trainer_trains_with_it(monkeypatch, tmp_path, mode):
    trainer = speaking(monkeypatch, tmp_path, vllm_rollout_mode=mode, max_steps=3)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 3 and all(math.isfinite(entry["loss"]) for entry in logs)
    for entry in logs:
        assert 0 < entry["rollout/cached_tokens"] <= entry["rollout/prefilled_tokens"] / 2
    assert trainer.vllm_generation.llm.log == ["sync"] * 3
    # Steps are counted from 0 again, with other weights
    trainer.train()
    assert trainer.vllm_generation.llm.log == ["sync"] * 6
    trainer._forget_loaded_weights()
    trainer.rollout([dict(trainer.train_dataset[0])])
    assert trainer.vllm_generation.llm.log == ["sync"] * 7


@pytest.mark.parametrize("weighting", ["once", "per_leaf"])
@pytest.mark.parametrize("correction", ["token_truncate", "sequence_truncate", None])
def test_ratios_of_rows_whose_prefix_another_branch_sampled(monkeypatch, tmp_path, weighting, correction):
    """A row's log-probs are those its turns were sampled with, whoever sampled them; ratios cover what is trained."""
    trainer = speaking(
        monkeypatch,
        tmp_path,
        turn_weighting=weighting,
        vllm_importance_sampling_correction=correction is not None,
        vllm_importance_sampling_mode=correction or "token_truncate",
        vllm_importance_sampling_clip_max=1e9,
    )
    kept = []
    roll_out = trainer._roll_out_training
    monkeypatch.setattr(trainer, "_roll_out_training", lambda inputs: kept.append(roll_out(inputs)) or kept[-1])
    batch = generation_batch(trainer)
    leaves = [(tree, leaf) for tree in kept[0][0] for leaf in tree.leaves()]
    shared = 0
    for row, (_, leaf) in enumerate(leaves):
        place = 0
        trained = torch.zeros(batch["completion_ids"].size(1), dtype=torch.bool)
        for turn in leaf.path():
            count = len(turn.token_ids)
            told = batch["sampling_per_token_logps"][row, place : place + count]
            assert told.tolist() == [-1.0 - number for number in range(count)]
            mask = batch["tool_mask"][row, place : place + count].bool()
            trained[place : place + count] = mask
            if len(list(turn.leaves())) > 1:
                shared += 1
            elif weighting == "once":
                assert mask.all()
            place += count + len(turn.observation_ids)
        if correction is None:
            continue
        difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[row]
        ratio = batch["importance_sampling_ratio"][row]
        if correction == "sequence_truncate":
            assert ratio.item() == pytest.approx(min(math.exp(difference[trained].sum()), 1e9), rel=1e-4)
        else:
            assert torch.allclose(ratio[trained], difference[trained].exp(), rtol=1e-4)
            assert (ratio[~trained] == 1).all()
    assert shared > 0
    assert ("importance_sampling_ratio" in batch) == (correction is not None)
    trainer.current_gradient_accumulation_steps = 1
    assert math.isfinite(trainer._compute_loss(trainer.model, batch).item())
