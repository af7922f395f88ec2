"""transformers' Trainer, its collators and peft on our models: each number is what plain PyTorch gives."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from needlework.data import byte_tokenizer
from needlework.layers import (
    CCQ,
    Attention,
    Carve,
    Delta,
    GatedConv,
    Lucid,
    Memory,
    Polar,
    QDelta,
    Recurrent,
    Rope,
    Softmax,
    SwiGLU,
)
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM
from needlework.testing.rows import chosen

RECURRENT, ATTENTION = {"heads": 2, "key_dim": 8, "value_dim": 8}, {"heads": 2, "head_dim": 8}
MIXERS = {
    "Q": Recurrent(write=QDelta(), **RECURRENT),
    "C": Recurrent(write=Carve(rank=2, content_chunk=4), **RECURRENT),
    "R": Recurrent(write=Delta(), read=CCQ(), **RECURRENT),
    "S": Attention(attend=Softmax(window=5), position=Rope(), **ATTENTION),
    "L": Attention(attend=Lucid(precondition="beta"), **ATTENTION),
    "P": Attention(attend=Polar(), memory=Memory(), output_gate=True, **ATTENTION),
    "G": GatedConv(),
}
DRAW = torch.Generator().manual_seed(1)
ROWS = [{"input_ids": torch.randint(256, (n,), generator=DRAW).tolist()} for n in (9, 5, 12, 7, 3, 10, 8, 11)]
PAD = DataCollatorForLanguageModeling(
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|eot|>", pad_token="<|eot|>"), mlm=False
)


def make(layout="QS", **settings):
    torch.manual_seed(0)
    return NeedleworkForCausalLM(
        NeedleworkConfig(
            hidden_size=16, layout=layout, mixers=MIXERS, mlp=SwiGLU(hidden=24), **{"initializer_range": 0.2} | settings
        )
    )


def trainer(model, folder, collator=PAD, compute_metrics=None, **settings):
    """Plain gradient descent on the eight rows, one step of all of them unless said."""
    settings = {
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "optim": "sgd",
        "learning_rate": 0.1, "max_grad_norm": 0, "lr_scheduler_type": "constant", "max_steps": 1,
        "per_device_train_batch_size": 8,
    } | settings  # fmt: skip
    return Trainer(
        model, TrainingArguments(folder, **settings), data_collator=collator, train_dataset=ROWS, eval_dataset=ROWS,
        compute_metrics=compute_metrics,
    )  # fmt: skip


def mean_loss(model, rows=ROWS, **settings):
    """The mean over all targets of all rows, each row by itself."""
    logits = torch.cat([model(torch.tensor([row["input_ids"]])).logits[0, :-1] for row in rows])
    return cross_entropy(logits, torch.tensor([token for row in rows for token in row["input_ids"][1:]]), **settings)


def step_by_hand(model, rate=0.1, **settings):
    """One step of gradient descent on the mean loss."""
    mean_loss(model, **settings).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad
    return model


def assert_same_weights(a, b, **tolerance):
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        torch.testing.assert_close(
            x, y, **tolerance or {"rtol": 0, "atol": 1e-6}, msg=lambda text, name=name: f"{name}: {text}"
        )


PACKED = {"collator": DataCollatorWithFlattening(return_tensors="pt")}
IN_PARTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
SETTINGS = {
    "one batch": {},
    "accumulated": IN_PARTS,
    "checkpointed": {"gradient_checkpointing": True},
    "packed": PACKED,
    "packed and accumulated": PACKED | IN_PARTS,
}


@pytest.mark.parametrize("settings", chosen(SETTINGS, quick=["checkpointed", "packed and accumulated"]))
def test_a_step_is_the_step_on_the_mean_over_all_targets(tmp_path, settings):
    """However the rows are dealt out: padded, packed, at once or in parts of unequal length."""
    model = make()
    trainer(model, tmp_path, **SETTINGS[settings]).train()
    assert_same_weights(model, step_by_hand(make()))


def test_label_smoothing_smooths_the_next_token(tmp_path):
    model = make()
    trainer(model, tmp_path, label_smoothing_factor=0.1).train()
    assert_same_weights(model, step_by_hand(make(), label_smoothing=0.1))


def test_evaluate_and_predict_give_loss_and_logits(tmp_path):
    model, seen = make().eval(), []

    def metrics(prediction):
        seen.append(prediction)
        return {"right": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}

    judge = trainer(model, tmp_path, compute_metrics=metrics, per_device_eval_batch_size=8)
    measured = judge.evaluate()
    assert measured["eval_loss"] == pytest.approx(mean_loss(model).item(), rel=1e-6) and "eval_right" in measured
    predicted = judge.predict(ROWS)
    padded = PAD(ROWS)
    with torch.no_grad():
        logits = model(padded["input_ids"], attention_mask=padded["attention_mask"]).logits
    for found in (predicted, seen[0]):
        assert torch.equal(torch.from_numpy(found.predictions), logits) and (found.label_ids == padded["labels"].numpy()).all()
    assert judge.evaluate()["eval_loss"] == measured["eval_loss"]


def test_a_run_that_was_stopped_goes_on_as_one_that_was_not(tmp_path):
    settings = {
        "per_device_train_batch_size": 2, "optim": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "linear",
        "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "save_only_model": False,
    }  # fmt: skip
    whole = make()
    trainer(whole, tmp_path, **settings).train()
    resumed = make()
    trainer(resumed, tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_weights(resumed, whole, rtol=0, atol=0)
    again = NeedleworkForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert_same_weights(again, whole, rtol=0, atol=0)


@pytest.mark.parametrize("layout", chosen([*MIXERS, "".join(MIXERS)], quick=["".join(MIXERS)]))
@pytest.mark.parametrize("checkpointing", chosen([False, True], quick=[True]))
def test_lora_trains_its_adapters_alone_and_merges(tmp_path, layout, checkpointing):
    base = make(layout).eval()
    before = copy.deepcopy(base.state_dict())
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights="gaussian", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    start = mean_loss(model.eval()).item()
    trainer(model, tmp_path, gradient_checkpointing=checkpointing, max_steps=3).train()
    assert mean_loss(model.eval()).item() < start
    adapters = [p for name, p in model.named_parameters() if "lora_B" in name]
    linears = [name for name, m in make(layout).named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    assert len(adapters) == len(linears)
    # a map that starts at zero gives what is before it no gradient at first, but its own adapter moves, and then that too
    assert all(p.abs().sum() > 0 for p in adapters)
    kept = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items() if "lora_" not in name}
    assert all(torch.equal(kept[name], value) for name, value in before.items())
    tokens = torch.randint(256, (2, 9))
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(make(layout), tmp_path / "adapter").eval()
    torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=0)
    expected = model.double()(tokens).logits  # merging adds products to weights: in float32 its rounding is what is seen
    torch.testing.assert_close(model.merge_and_unload()(tokens).logits, expected, rtol=1e-12, atol=1e-12)


def test_a_half_precision_trainer_trains_and_evaluates(tmp_path):
    model = make("QSCP")
    judge = trainer(model, tmp_path, bf16=True, max_steps=5, learning_rate=0.3)
    start = judge.evaluate()["eval_loss"]
    judge.train()
    assert judge.evaluate()["eval_loss"] < start - 0.01
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_pads_count_for_nothing_and_a_part_of_a_batch_for_its_part():
    model = make("QCRSLPG").eval()
    batch, expected = PAD(ROWS[:4]), mean_loss(model, ROWS[:4]).item()
    assert (batch["labels"] == -100).any()
    assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-6)
    counted = batch["labels"][:, 1:].ne(-100).sum()
    assert model(**batch, num_items_in_batch=4 * counted).loss.item() == pytest.approx(expected / 4, rel=1e-6)
