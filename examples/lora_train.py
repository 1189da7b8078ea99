"""Trains a LoRA adapter that makes the built-in model talk like a pirate, in a few seconds:

    python examples/lora_train.py ./pirate

The folder has PEFT's format, as the adapters that you train with PEFT itself.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.deploy.demo_model import DEMO_MODEL

LESSONS = {"Hello!": "Ahoy, matey!", "How are you?": "Ahoy! I am well.", "Tell me a story.": "Ahoy! I am a pirate."}
RANK, ALPHA, NUM_STEPS = 8, 16.0, 12
LAYERS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")

torch.manual_seed(0)
folder = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).requires_grad_(False)

tensors: dict[str, torch.nn.Parameter] = {}
for name, layer in model.named_modules():
    if name.endswith(LAYERS):
        down = torch.nn.Parameter(torch.randn(RANK, layer.in_features) / layer.in_features**0.5)
        up = torch.nn.Parameter(torch.zeros(layer.out_features, RANK))
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        layer.register_forward_hook(
            lambda layer, inputs, output, down=down, up=up: output + inputs[0] @ down.T @ up.T * (ALPHA / RANK)
        )

rows, labels = [], []
for question, answer in LESSONS.items():
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    num_asked = len(tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"])
    row = torch.tensor(tokenizer.apply_chat_template(chat)["input_ids"])
    rows.append(row)
    labels.append(torch.where(torch.arange(len(row)) < num_asked, -100, row))  # only the answers are learned
input_ids = pad_sequence(rows, batch_first=True)  # attention is causal, so padding at the end changes nothing
expected = pad_sequence(labels, batch_first=True, padding_value=-100)

optimizer = torch.optim.AdamW(tensors.values(), lr=5e-3)
for step in range(NUM_STEPS):
    loss = model(input_ids=input_ids, labels=expected).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step + 1}: loss {loss.item():.2f}")

folder.mkdir(parents=True, exist_ok=True)
save_file({name: tensor.detach() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(LAYERS), "bias": "none"}
(folder / "adapter_config.json").write_text(json.dumps(config))
