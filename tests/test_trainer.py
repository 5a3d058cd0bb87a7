"""transformers' Trainer takes our models as they are: it trains, accumulates, evaluates, saves, resumes and recomputes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ligerformer
from tests.configs.examples import plain
from tests.convert.hf_models import hf_model

ROWS, TOKENS, VOCABULARY = 24, 12, 40
ORIGINS = ["dict", "from_hf"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    hf_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(params=ORIGINS)
def make(request: pytest.FixtureRequest, checkpoint: Path) -> Any:
    if request.param == "from_hf":
        return lambda: ligerformer.from_hf(checkpoint)
    return lambda: ligerformer.build(plain() | {"vocab_size": VOCABULARY, "init": {"std": 0.3}}, seed=0)


def rows(count: int = ROWS) -> list[dict[str, torch.Tensor]]:
    """Rows of one length whose numbers of valid labels differ; in every other row the first label counts too, though nothing predicts it."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        ids = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        labels, ignored = ids.clone(), 1 + i * 7 % (TOKENS - 2)
        labels[i % 2 : i % 2 + ignored] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def trainer(model: Any, folder: Path, cls: Any = None, **options: Any) -> Any:
    options = {"max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2} | options
    kept = {name: options.pop(name) for name in ("compute_metrics", "processing_class") if name in options}
    args = transformers.TrainingArguments(
        str(folder), logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=3, **options
    )
    return (cls or transformers.Trainer)(model=model, args=args, train_dataset=rows(), eval_dataset=rows(6), **kept)


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


class Calls(list[dict[str, Any]]):
    """What each call of a model was given and returned."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.register_forward_hook(lambda _, args, given, output: self.append(given | {"output": output}), with_kwargs=True)


class WithLogits(transformers.Trainer):
    """As docs/getting-started.md has it."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        return super().prediction_step(model, inputs | {"return_logits": not prediction_loss_only}, prediction_loss_only, ignore_keys)


def test_trains_saves_and_resumes_to_the_same_bits(make: Any, tmp_path: Path) -> None:
    through = trainer(make(), tmp_path, save_steps=3)
    config = through.model.config
    before = config.to_dict()
    through.train()
    assert len(losses(through)) == 5 and all(0 < loss < 20 for loss in losses(through))
    assert config.to_dict() == before and config == make().config
    resumed = trainer(make(), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 5 and losses(resumed)[-2:] == losses(through)[-2:]
    for name, parameter in through.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name


def test_parts_of_a_batch_sum_to_the_loss_of_the_whole(make: Any, tmp_path: Path) -> None:
    model = make()
    calls = Calls(model)
    run = trainer(model, tmp_path, learning_rate=0.0)
    run.train()
    shifted = getattr(run, "_loss_shifts_labels", None)  # older versions count the first label of a row too
    assert shifted is not False
    counts = [int((call["labels"][:, 1:] != -100).sum()) for call in calls]
    assert len(calls) == 10 and sum(one != two for one, two in zip(counts[::2], counts[1::2], strict=True)) >= 3
    for one, two in zip(calls[::2], calls[1::2], strict=True):
        labels = torch.cat([one["labels"], two["labels"]])
        count = int((labels[:, 1 if shifted else 0 :] != -100).sum())
        assert int(one["num_items_in_batch"]) == int(two["num_items_in_batch"]) == count
        whole = model(torch.cat([one["input_ids"], two["input_ids"]]), labels, num_items_in_batch=None if shifted else count).loss
        torch.testing.assert_close(one["output"].loss + two["output"].loss, whole, rtol=1e-6, atol=0)


def test_accumulation_trains_as_the_whole_batch_does(make: Any, tmp_path: Path) -> None:
    runs = [
        trainer(make(), tmp_path, optim="sgd", per_device_train_batch_size=size, gradient_accumulation_steps=4 // size)
        for size in (1, 2, 4)
    ]
    for run in runs:
        run.train()
    for run in runs[1:]:
        assert losses(run) == pytest.approx(losses(runs[0]), rel=1e-5)


def test_evaluates_the_loss_alone_without_logits(make: Any, tmp_path: Path) -> None:
    model = make()
    run, calls = trainer(model, tmp_path), Calls(model)
    metrics = run.evaluate()
    batches = [torch.stack([row["input_ids"] for row in rows(6)]).split(3), torch.stack([row["labels"] for row in rows(6)]).split(3)]
    expected = sum(model(ids, labels).loss.item() for ids, labels in zip(*batches, strict=True)) / 2
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert [list(call["output"]) for call in calls[:2]] == [["loss"], ["loss"]]


def test_evaluates_with_logits_where_they_are_asked_for(make: Any, tmp_path: Path) -> None:
    seen = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {"accuracy": float((prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]).mean())}

    model = make()
    run = trainer(model, tmp_path, WithLogits, compute_metrics=compute_metrics)
    metrics = run.evaluate()
    assert {"eval_loss", "eval_accuracy"} <= set(metrics)
    expected = model(torch.stack([row["input_ids"] for row in rows(6)])).logits
    torch.testing.assert_close(torch.from_numpy(seen[0].predictions), expected, rtol=1e-5, atol=1e-5)
    assert seen[0].label_ids.shape == (6, TOKENS)
    assert run.predict(rows(6)).predictions.shape == (6, TOKENS, VOCABULARY)


def test_gradient_checkpointing_recomputes_and_changes_no_loss(make: Any, tmp_path: Path) -> None:
    plain_run, recomputing = trainer(make(), tmp_path), trainer(make(), tmp_path, gradient_checkpointing=True)
    runs_of_layer_0 = []
    recomputing.model.layers[0].register_forward_pre_hook(lambda *_: runs_of_layer_0.append(1))
    plain_run.train()
    recomputing.train()
    assert recomputing.model.recompute == "layer" and plain_run.model.recompute == "none"
    assert losses(recomputing) == losses(plain_run) and len(runs_of_layer_0) == 20


def test_options_of_checkpointing_that_are_not_served_are_refused(make: Any) -> None:
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert model.recompute == "layer"
    model.gradient_checkpointing_disable()
    assert model.recompute == "none"
    for options in ({"every_n_layers": 2}, {"offload": True}, {"activation_checkpointing_kwargs": {"debug": True}}):
        with pytest.raises(ValueError, match=r"activation checkpointing: .* is not served; expected use_reentrant alone"):
            model.activation_checkpointing_enable(**options)
    assert model.recompute == "none"


def test_a_tokenizer_may_be_given_to_the_trainer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>", pad_token="</s>")
    model = ligerformer.build(plain() | {"vocab_size": VOCABULARY}, seed=0)
    run = trainer(model, tmp_path, processing_class=tokenizer, max_steps=1)
    run.data_collator = transformers.default_data_collator
    run.train()
    run.save_model(str(tmp_path / "final"))
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "final").iterdir()}


def test_a_config_is_frozen_but_for_what_the_trainer_sets() -> None:
    config = ligerformer.ModelConfig.from_dict(plain())
    for name in ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, 1)
        assert config == ligerformer.ModelConfig.from_dict(plain()) and not hasattr(config, name)
    for name in ("hidden_size", "anything"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 7)
    assert ligerformer.ModelConfig.from_dict(json.loads(config.to_json_string())) == config
