"""
What `test_hub.py` has other processes do, since the Hub's address is read at import: `python hub_jobs.py push FOLDER`
trains and pushes, `python hub_jobs.py load FOLDER REVISION` loads it back. Both write what they saw to `FOLDER`.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch


TEXT = "what is red and what is green: the quick brown fox"
REPOS = ("tester/full", "tester/adapter", "tester/end")


def config(output_dir, **kwargs):
    from toys import make_config

    # The reward of random text is now above this and now below
    options = dict(
        success_threshold=0.8, gradient_accumulation_steps=3, push_to_hub=True, save_strategy="steps", save_steps=1
    )
    return make_config(output_dir, **(options | kwargs))


def train(output_dir, model, resume=None, **kwargs):
    """A trained trainer. Each push is waited for: one that is due while another runs is left out."""
    from transformers import TrainerCallback

    from toys import length_reward, make_tokenizer, string_dataset
    from trace_trl import TRACETrainer

    class Wait(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            trainer._finish_current_push()

    trainer = TRACETrainer(
        model=model,
        reward_funcs=length_reward,
        train_dataset=string_dataset(16),  # two pools: one epoch
        processing_class=make_tokenizer(),
        peft_config=kwargs.pop("peft_config", None),
        callbacks=[Wait()] if kwargs.get("push_to_hub", True) else None,
        args=config(output_dir, **kwargs),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def observe(trainer) -> dict:
    """Logits of shape `(tokens, vocabulary)` and values of shape `(tokens,)` of `TEXT`, as the trainer has them."""
    from trace_trl.predictor import HiddenStates

    ids = trainer.processing_class(TEXT)["input_ids"]
    reader = HiddenStates(lambda: trainer.model, pad_token_id=0, batch_size=1, context=nullcontext)
    (states,) = reader.read([ids], [range(len(ids))])
    trainer.model.eval()
    with torch.no_grad():
        return {"logits": trainer.model(torch.tensor([ids])).logits[0], "values": trainer.predictor(states)}


def push(folder: Path) -> None:
    from peft import LoraConfig

    from toys import make_model, make_tokenizer

    make_model().push_to_hub("tester/base")
    make_tokenizer().push_to_hub("tester/base")

    full = train(folder / "full", "tester/base", hub_model_id="tester/full", hub_strategy="checkpoint")

    adapter = train(
        folder / "adapter",
        "tester/base",
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
        hub_model_id="adapter",  # of whose token it is
        hub_strategy="every_save",
        log_trees=True,
    )

    end = train(folder / "end", make_model(seed=1), hub_strategy="end", max_steps=1, log_trees=True)
    left = folder / "end" / "_saving" / "checkpoint-9"  # by a run that was killed
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    end.push_to_hub(dataset_name="tester/questions", tags=["mine"])
    end.push_to_hub(commit_message="Once more")

    torch.save(
        {repo: observe(trainer) for repo, trainer in zip(REPOS, (full, adapter, end), strict=True)}, folder / "pushed"
    )


def load(folder: Path, revision: str) -> None:
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForCausalLM, AutoTokenizer

    seen, states = {}, {}
    for repo in REPOS:
        model = AutoModelForCausalLM.from_pretrained(repo)
        ids = AutoTokenizer.from_pretrained(repo)(TEXT, return_tensors="pt")
        with torch.no_grad():
            output = model(**ids, output_hidden_states=True)
        seen[repo], states[repo] = {"logits": output.logits[0]}, output.hidden_states[-1][0]
    assert "trace_trl" not in sys.modules  # plain transformers so far

    from trace_trl import SuccessPredictor

    for repo in REPOS:
        seen[repo]["values"] = SuccessPredictor.from_pretrained(repo, cache_dir=folder / "heads")(states[repo])
    seen["earlier"] = SuccessPredictor.from_pretrained("tester/full", revision=revision)(states["tester/full"])
    last = SuccessPredictor.from_pretrained("tester/full", subfolder="last-checkpoint")
    seen["last"] = last(states["tester/full"])

    seen["errors"] = {}
    for repo in ("tester/base", "tester/nowhere", str(folder / "nowhere")):
        try:
            SuccessPredictor.from_pretrained(repo)
        except FileNotFoundError as error:
            seen["errors"][repo] = str(error)

    checkpoint = Path(snapshot_download("tester/full", revision=revision, allow_patterns="last-checkpoint/*"))
    resumed = train(folder / "resumed", "tester/base", resume=str(checkpoint / "last-checkpoint"), push_to_hub=False)
    seen["resumed"] = observe(resumed) | {"steps": [e["step"] for e in resumed.state.log_history if "loss" in e]}
    torch.save(seen, folder / "loaded")


if __name__ == "__main__":
    job, folder, *rest = sys.argv[1:]
    {"push": push, "load": load}[job](Path(folder), *rest)
