"""One round of generation: exact lengths, stop strings, limits, and both of transformers' ways to generate."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toys import chat_dataset, make_model, make_tokenizer, make_trainer, string_dataset, unusual, usual
from trace_trl import StepResult, checks, generation
from trace_trl.generation import Request, Sample, TurnStopStrings, row_lengths, stop_string_end


TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id
PAD = TOKENIZER.pad_token_id
QUICK = settings(deadline=None, database=None, max_examples=200)


# Lengths


@st.composite
def sampled_rows(draw):
    """Rows as `generate` returns them: sampled ids up to where each ended, then padding, which may be an end token."""
    ends = draw(st.sampled_from([[1], [1, 2]]))
    pad = draw(st.sampled_from([0, 1]))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        body = draw(st.lists(st.integers(3, 6), max_size=6))
        how = draw(st.sampled_from(["eos", "stop", "length"])) if body else "eos"
        rows.append((body + [draw(st.sampled_from(ends))] if how == "eos" else body, how))
    width = max(len(ids) for ids, _ in rows)
    # What runs into the limit is as long as the longest
    rows = [(ids + [3] * (width - len(ids)) if how == "length" else ids, how) for ids, how in rows]
    # Padding that completes a stop string after a row has ended is seen by the criterion, and of no account
    late = [draw(st.none() | st.integers(len(ids) + 1, width)) if len(ids) < width else None for ids, _ in rows]
    return rows, [ids + [pad] * (width - len(ids)) for ids, _ in rows], late, ends


@given(sampled_rows())
@QUICK
def test_row_lengths_against_what_was_sampled(case):
    rows, padded, late, ends = case
    stops = [len(ids) if how == "stop" else later or -1 for (ids, how), later in zip(rows, late, strict=True)]
    stops = [-1 if how == "length" else stop for stop, (_, how) in zip(stops, rows, strict=True)]
    lengths, stopped = row_lengths(torch.tensor(padded), ends, torch.tensor(stops))
    assert lengths == [len(ids) for ids, _ in rows]
    assert stopped == [how == "stop" for _, how in rows]
    if not any(how == "stop" for _, how in rows):
        assert row_lengths(torch.tensor(padded), ends, None) == (lengths, stopped)


def test_row_lengths_of_nothing():
    assert row_lengths(torch.empty((2, 0), dtype=torch.long), [1], None) == ([0, 0], [False, False])


TEXTS = st.text(st.sampled_from("redfox \n日é|<>"), max_size=20)


@given(TEXTS, st.lists(st.text(st.sampled_from("redfox \n日é"), min_size=1, max_size=4), max_size=3), st.booleans())
@QUICK
def test_stop_string_end_against_brute_force(text, stop_strings, bytewise):
    ids = (unusual if bytewise else usual)(TOKENIZER, text)
    counts = [n for n in range(1, len(ids) + 1) if any(stop in TOKENIZER.decode(ids[:n]) for stop in stop_strings)]
    assert stop_string_end(TOKENIZER.decode, ids, stop_strings) == (counts[0] if counts else None)


@given(TEXTS, st.text(st.sampled_from("redfox "), min_size=1, max_size=4))
@QUICK
def test_both_ways_of_finding_a_stop_string_agree(text, stop):
    ids = usual(TOKENIZER, text)
    criterion = TurnStopStrings(TOKENIZER, [stop])
    criterion.begin(2)
    prompt = usual(TOKENIZER, "re")[:1] * 2
    for n in range(1, len(ids) + 1):
        criterion(torch.tensor([prompt + ids[:n]]), None)
    expected = stop_string_end(TOKENIZER.decode, ids, [stop])
    found = -1 if criterion.lengths is None else criterion.lengths.item()
    assert found == (-1 if expected is None else expected)


# With a model that says what is wanted


@contextmanager
def saying(model, *rows):
    """A model whose sampled tokens are `rows`, whatever it is shown; rows that are over go on with the last."""
    steps = iter(range(10**6))

    def force(module, args, kwargs, output):
        step = next(steps)
        output.logits[:, -1] = -1e9
        for number, ids in enumerate(rows):
            output.logits[number, -1, ids[min(step, len(ids) - 1)]] = 0.0
        return output

    handle = model.register_forward_hook(force, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    """A generation backend with two stop strings, for a tokenizer whose padding is the end token."""
    tokenizer = make_tokenizer(pad_token="<|im_end|>")
    trainer = make_trainer(
        tmp_path_factory.mktemp("padded"),
        tokenizer=tokenizer,
        turn_stop_strings=["fox", "yes\n"],
        continuations_per_root=1,
        max_completion_length=20,
    )
    assert tokenizer.pad_token_id == END
    return trainer._engine.generate


def sample(generator, contexts, rows, limits=None):
    limits = [20] * len(rows) if limits is None else limits
    with saying(generator.trainer.model, *rows):
        return generator([Request(list(c), limit) for c, limit in zip(contexts, limits, strict=True)])


RED, GREEN = usual(TOKENIZER, "red"), usual(TOKENIZER, "green")
FOX = unusual(TOKENIZER, "fox")


def test_end_token_stop_string_and_limit_in_one_batch(generator):
    rows = [RED + [END], RED + FOX + GREEN, GREEN * 20, FOX, [END]]
    samples = sample(generator, [[9], [9] * 5, RED, [9], [9, 9]], rows)
    assert samples == [
        Sample(RED + [END], "eos"),
        Sample(RED + FOX, "stop"),
        Sample((GREEN * 20)[:20], "length"),
        Sample(FOX, "stop"),
        Sample([END], "eos"),
    ]


def test_a_stop_string_is_not_matched_across_the_end_of_the_prompt(generator):
    for cut in (1, 2):
        # The prompt ends with the first letters of a stop string, the policy says the rest
        said = FOX[cut:] + RED + [END]
        assert sample(generator, [RED + FOX[:cut]], [said]) == [Sample(said, "eos")]
    said = FOX[1:] + FOX
    assert sample(generator, [FOX[:1]], [said]) == [Sample(said, "stop")]
    # Nor is one that stands in the prompt
    assert sample(generator, [FOX], [RED + [END]]) == [Sample(RED + [END], "eos")]


def test_a_stop_string_that_ends_inside_a_token(generator, monkeypatch):
    monkeypatch.setattr(generator, "stop_strings", ["d fo"])
    monkeypatch.setattr(generator, "_stop", None)
    (fox,) = usual(TOKENIZER, " fox")
    assert sample(generator, [[9]], [RED + [fox] + GREEN]) == [Sample(RED + [fox], "stop")]


def test_the_first_of_two_stop_strings_ends_a_turn(generator):
    yes = unusual(TOKENIZER, "yes\n")
    assert sample(generator, [[9], [9]], [yes + FOX, FOX + yes]) == [Sample(yes, "stop"), Sample(FOX, "stop")]


def test_an_end_token_before_and_after_a_stop_string(generator):
    # Behind the end token all is padding, which is an end token here
    rows = [FOX[:2] + [END] + FOX[2:], FOX + [END]]
    assert sample(generator, [[9], [9]], rows) == [Sample(FOX[:2] + [END], "eos"), Sample(FOX, "stop")]


def test_a_stop_string_that_the_end_token_completes(tmp_path):
    trainer = make_trainer(tmp_path, turn_stop_strings=["red<|im_end|>"], continuations_per_root=1)
    assert sample(trainer._engine.generate, [[9]], [RED + [END]], [12]) == [Sample(RED + [END], "eos")]


@pytest.mark.parametrize(
    ("said", "limit", "expected"),
    [
        (RED + FOX, len(RED) + 3, "stop"),
        (RED + FOX, len(RED) + 2, "length"),
        (RED + [END], len(RED) + 1, "eos"),
        (RED + [END], len(RED), "length"),
        ([END], 1, "eos"),
        (FOX, 1, "length"),
    ],
)
def test_limits_of_each_branch(generator, said, limit, expected):
    # Another branch of the same call may use more
    first, other = sample(generator, [[9], [9]], [said + GREEN * 10, GREEN * 20], [limit, 20])
    assert first == Sample(said[:limit], expected)
    assert other == Sample((GREEN * 20)[:20], "length")


def test_the_stop_strings_are_prepared_once(generator, monkeypatch):
    made = []
    original = TurnStopStrings.__init__
    monkeypatch.setattr(TurnStopStrings, "__init__", lambda self, *args: made.append(self) or original(self, *args))
    monkeypatch.setattr(generator, "_stop", None)
    # Other prompts and other rows in every call
    for context, expected in (([9], "stop"), ([9] * 7, "stop"), (RED, "eos")):
        said = RED + FOX if expected == "stop" else RED + [END]
        assert sample(generator, [context], [said]) == [Sample(said, expected)]
        assert sample(generator, [context] * 3, [said] * 3) == [Sample(said, expected)] * 3
    assert len(made) == 1


def test_without_stop_strings_none_is_looked_for(tmp_path):
    trainer = make_trainer(tmp_path, continuations_per_root=1)
    assert sample(trainer._engine.generate, [[9]], [FOX + [END]], [12]) == [Sample(FOX + [END], "eos")]
    assert trainer._engine.generate._stop is None


@given(limits=st.lists(st.integers(1, 20), min_size=1, max_size=4), seed=st.integers(0, 10**6))
@settings(deadline=None, database=None, max_examples=25)
def test_real_sampling_keeps_to_limits_and_stops_at_once(generator, limits, seed):
    torch.manual_seed(seed)
    generator.stop_strings, generator._stop = ["e", "é", "o "], None
    try:
        samples = generator([Request([7 + number] * (1 + number), limit) for number, limit in enumerate(limits)])
    finally:
        generator.stop_strings, generator._stop = ["fox", "yes\n"], None
    for limit, drawn in zip(limits, samples, strict=True):
        ids = drawn.token_ids
        assert 1 <= len(ids) <= limit
        assert END not in ids[:-1]
        stop = stop_string_end(generator.trainer._tokenizer.decode, ids, ["e", "é", "o "])
        assert stop in (None, len(ids))
        if ids[-1] == END:
            assert drawn.finish == "eos"
        elif stop is not None:
            assert drawn.finish == "stop"
        else:
            assert (drawn.finish, len(ids)) == ("length", limit)


def test_rows_of_a_call_do_not_depend_on_each_other(generator):
    """Greedy turns of a padded batch are those of each context alone."""
    trainer = generator.trainer
    contexts = [[11], [12] * 9, [13, 14, 15], [16] * 4]
    config = trainer.generation_config
    config.do_sample = False
    try:
        together = generator([Request(context, 6) for context in contexts])
        alone = [generator([Request(context, 6)])[0] for context in contexts]
    finally:
        config.do_sample = True
    assert together == alone


@pytest.mark.parametrize("training", [True, False])
def test_generation_leaves_the_mode_and_the_configuration_as_they_were(generator, training):
    trainer = generator.trainer
    trainer.model.train(training)
    before = trainer.generation_config.to_dict(), trainer.model.generation_config.to_dict()
    sample(generator, [[9]], [RED + [END]], [5])
    assert trainer.model.training is training
    assert (trainer.generation_config.to_dict(), trainer.model.generation_config.to_dict()) == before
    trainer.model.train()


@pytest.mark.parametrize("error", [None, ValueError("of an environment")])
def test_rounds_unwrap_the_model_once_and_wrap_it_again_whatever_happens(generator, monkeypatch, error):
    trainer = generator.trainer
    model, unwrap, unwrapped = trainer.model, trainer.accelerator.unwrap_model, []
    monkeypatch.setattr(trainer.accelerator, "unwrap_model", lambda *a, **k: unwrapped.append(a) or unwrap(*a, **k))
    model.gradient_checkpointing_enable()
    try:
        with pytest.raises(ValueError) if error else nullcontext(), generator.session():
            assert not model.is_gradient_checkpointing
            for _ in range(3):
                (turn,) = sample(generator, [[9]], [RED + [END]], [5])
                assert turn.token_ids == RED + [END]
            if error:
                raise error
        assert model.is_gradient_checkpointing and len(unwrapped) == 1
        sample(generator, [[9]], [RED + [END]], [5])
        assert model.is_gradient_checkpointing and len(unwrapped) == 2
    finally:
        model.gradient_checkpointing_disable()


def test_sharded_weights_are_gathered_in_each_round_alone(generator, monkeypatch):
    trainer = generator.trainer
    unwrapped = []
    monkeypatch.setattr(trainer, "_dist", SimpleNamespace(is_zero3=True))
    monkeypatch.setattr(generation, "unwrap_model_for_generation", lambda *a, **k: unwrapped.append(a))
    with generator.session():
        assert not unwrapped and generator._model is None


def test_rows_other_than_asked_for_are_refused(generator, monkeypatch):
    monkeypatch.setattr(generator, "_generate_padded", lambda contexts, config: [([END], False)])
    with pytest.raises(RuntimeError, match="returned 1 turns for 2 branches"):
        generator([Request([9], 3), Request([9], 3)])


# Continuous batching. Its default cache is half of the machine's memory

SMALL_CACHE = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 128}


def batched_trainer(output_dir, **kwargs):
    return make_trainer(
        output_dir,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=SMALL_CACHE,
        **{"continuations_per_root": 1, "max_completion_length": 12, **kwargs},
    )


@pytest.mark.parametrize("training", [True, False])
def test_continuous_batching_draws_what_padded_generation_draws(tmp_path, training):
    contexts, limits = [[11], [12] * 9, [13, 14, 15]], [12, 3, 7]
    requests = [Request(context, limit) for context, limit in zip(contexts, limits, strict=True)]
    padded, batched = make_trainer(tmp_path / "a", continuations_per_root=1), batched_trainer(tmp_path / "b")
    for trainer in (padded, batched):
        trainer.generation_config.do_sample = False
        trainer.model.train(training)
    expected = padded._engine.generate(requests)
    assert batched._engine.generate(requests) == expected
    assert [len(drawn.token_ids) for drawn in expected] == limits
    assert batched.model.training is training
    # A stop string cuts a turn behind its first occurrence
    third = TOKENIZER.decode(expected[0].token_ids[:3])
    batched._engine.generate.stop_strings = [third[-1]]
    length = stop_string_end(TOKENIZER.decode, expected[0].token_ids, [third[-1]])
    assert batched._engine.generate(requests[:1]) == [Sample(expected[0].token_ids[:length], "stop")]


def outputs_of(*rows, error=None):
    return {str(n): SimpleNamespace(generated_tokens=ids, error=error) for n, ids in enumerate(rows)}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_continuous_batching_gives_the_weights_their_precision_back(tmp_path, monkeypatch, precision):
    """Weights of half precision swallow an optimizer's small steps, frequencies of half precision shift positions."""
    trainer = batched_trainer(tmp_path)
    setattr(trainer.args, precision, True)
    model, seen = trainer.model, []
    tensors = [*model.named_parameters(), *model.named_buffers()]
    before = {name: (tensor, tensor.clone()) for name, tensor in tensors}
    count = len({id(tensor) for tensor in model.parameters()})

    def generate_batch(*args, **kwargs):
        seen.append(({p.dtype for p in model.parameters()}, {b.dtype for b in model.buffers()}))
        assert len({id(tensor) for tensor in model.parameters()}) == count  # what is tied stays so
        raise RuntimeError("out of blocks")

    monkeypatch.setattr(model, "generate_batch", generate_batch, raising=False)
    with pytest.raises(RuntimeError, match="out of blocks"):
        trainer._engine.generate([Request([9], 3)])
    assert seen == [({{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}, {torch.float32})]
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert before.keys() == after.keys()
    for name, (tensor, value) in before.items():
        assert after[name] is tensor and tensor.dtype == torch.float32 and torch.equal(tensor, value), name


def test_continuous_batching_leaves_the_hooks_of_gradients_alone(tmp_path):
    """DDP averages gradients by them. Other data in a parameter's place takes them off, without an error."""
    trainer = batched_trainer(tmp_path, bf16=True)
    called = []
    hooks = []
    for parameter in trainer.model.parameters():
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        hooks.append((node, node.register_hook(lambda *args: called.append(1))))
    trainer._engine.generate([Request([9], 3)])
    trainer.model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert len(called) == len(hooks)


def test_continuous_batching_in_half_precision_is_refused_where_fsdp_shards():
    args = SimpleNamespace(use_transformers_continuous_batching=True, bf16=True, fp16=False)
    with pytest.raises(ValueError, match="set it to `False`, or generate with `use_vllm=True`"):
        checks.check_continuous_batching(args, True)
    checks.check_continuous_batching(args, False)
    args.bf16 = False
    checks.check_continuous_batching(args, True)


def test_continuous_batching_draws_the_same_in_half_precision(tmp_path):
    trainer, halved = batched_trainer(tmp_path / "a"), batched_trainer(tmp_path / "b", bf16=True)
    for each in (trainer, halved):
        each.generation_config.do_sample = False
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.bfloat16()
    requests = [Request([11, 12, 13], 6), Request([14] * 5, 6)]
    assert halved._engine.generate(requests) == trainer._engine.generate(requests)


def test_continuous_batching_cuts_turns_where_they_end(tmp_path, monkeypatch):
    trainer = batched_trainer(tmp_path, turn_stop_strings=["fox"])
    rows = [RED + FOX + GREEN + [END], RED + [END], GREEN * 9, FOX + [END], RED + FOX]
    monkeypatch.setattr(trainer.model, "generate_batch", lambda *args, **kwargs: outputs_of(*rows), raising=False)
    samples = trainer._engine.generate(
        [Request([9], 12), Request([9], 12), Request([9], 4), Request([9], 3), Request([9], 3)]
    )
    assert samples == [
        Sample(RED + FOX, "stop"),
        Sample(RED + [END], "eos"),
        Sample((GREEN * 9)[:4], "length"),
        Sample(FOX, "stop"),
        Sample((RED + FOX)[:3], "length"),
    ]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (outputs_of([END]), "returned 1 turns for 2 branches"),
        (outputs_of([END], [END], error="out of blocks"), "failed for 2 of 2 branches: out of blocks"),
    ],
    ids=["missing", "failed"],
)
def test_continuous_batching_that_loses_a_branch_is_refused(tmp_path, monkeypatch, outputs, message):
    trainer = batched_trainer(tmp_path)
    monkeypatch.setattr(trainer.model, "generate_batch", lambda *args, **kwargs: outputs, raising=False)
    with pytest.raises(RuntimeError, match=message):
        trainer._engine.generate([Request([9], 3), Request([9], 3)])


def two_turns(state, action, messages):
    return StepResult(observation="\nred\n", done=len(messages) > 2)


@pytest.mark.parametrize("dataset", [chat_dataset, string_dataset])
def test_training_with_continuous_batching(tmp_path, dataset):
    before = make_model().state_dict()
    trainer = batched_trainer(
        tmp_path,
        dataset=dataset(),
        env_step=two_turns,
        turn_stop_strings=["a", "e"],
        max_turn_length=4,
        max_completion_length=60,
        max_turns=2,
        max_steps=2 if dataset is chat_dataset else 1,
    )
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps
    assert trainer.state.log_history[0]["rollout/rounds"] <= 4
    assert trainer.state.log_history[0]["rollout/bare_leaves"] == 2
    assert any((before[name] != value).any() for name, value in trainer.model.state_dict().items())
