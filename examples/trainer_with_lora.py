"""transformers' Trainer and peft's LoRA on a needlework model.

You learn: any mixers make a transformers model, so Trainer, its collators, `from_pretrained` and peft work as they do elsewhere. LoRA
trains low-rank adapters of every linear map and leaves the base model as it is; merged, the adapters cost nothing.
"""

import copy
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from needlework.data import byte_tokenizer
from needlework.layers import CCQ, Attention, Lucid, QDelta, Recurrent, Rope, SwiGLU
from needlework.models import NeedleworkConfig, NeedleworkForCausalLM

LINES = ("the needle is in the hay", "the hay is in the barn", "the barn is on the hill", "the hill is green")


def main(folder: str) -> None:
    torch.manual_seed(0)
    mixers = {
        "R": Recurrent(heads=2, key_dim=16, value_dim=16, write=QDelta(), read=CCQ()),
        "L": Attention(heads=2, head_dim=16, attend=Lucid(), position=Rope()),
    }
    config = NeedleworkConfig(hidden_size=32, layout="RL", mixers=mixers, mlp=SwiGLU(hidden=64), initializer_range=0.2)
    NeedleworkForCausalLM(config).save_pretrained(f"{folder}/base")

    base = NeedleworkForCausalLM.from_pretrained(f"{folder}/base")
    before = copy.deepcopy(base.state_dict())
    lora = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)

    rows = [{"input_ids": byte_tokenizer().encode(line).ids} for line in LINES]
    arguments = TrainingArguments(
        f"{folder}/trainer", max_steps=40, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    packing = DataCollatorWithFlattening(return_tensors="pt")  # four lines in one row, which do not see each other
    trainer = Trainer(model, arguments, data_collator=packing, train_dataset=rows, eval_dataset=rows)
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    last = trainer.evaluate()["eval_loss"]
    print(f"loss {first:.2f} -> {last:.2f}")
    assert last < first - 1

    kept = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items() if "lora_" not in name}
    assert all(torch.equal(kept[name], value) for name, value in before.items())

    model.eval().save_pretrained(f"{folder}/adapter")
    tokens = torch.tensor([rows[0]["input_ids"]])
    expected = model(tokens).logits
    again = PeftModel.from_pretrained(NeedleworkForCausalLM.from_pretrained(f"{folder}/base"), f"{folder}/adapter").eval()
    torch.testing.assert_close(again(tokens).logits, expected)
    torch.testing.assert_close(model.merge_and_unload()(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    print("the base model is unchanged; the adapter loads, and merges into it")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
