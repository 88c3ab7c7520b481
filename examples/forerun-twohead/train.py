"""Trains the heads for the bundled target, a minute on a CPU:

    pip install ../../training  # the generator of word problems
    python train.py src/forerun_twohead/heads.safetensors

The target is frozen. It runs once over worked word problems (it would answer nearly all of them in
these very words); the heads learn the tokens 2 and 3 ahead of each token of the answers.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from forerun.llm.bundled import bundled
from forerun_train.toys.word_problems import TRAIN_SEEDS, generate
from forerun_twohead.heads import Heads, Shape


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the heads for the bundled target.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--rank", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    started = time.perf_counter()
    folder = bundled("target")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    hidden, ahead = examples(target, tokenizer, args.problems, args.heads)
    print(f"{len(hidden)} tokens after {time.perf_counter() - started:.0f} s")
    heads = Heads(Shape(args.heads, args.rank, hidden.shape[1]))
    train(heads, target.lm_head.weight, hidden, ahead, args.epochs)
    weights = {name: weight.detach().bfloat16() for name, weight in heads.state_dict().items()}
    save_file(weights, args.out)
    print(f"{args.out} after {time.perf_counter() - started:.0f} s")


@torch.inference_mode()
def examples(target, tokenizer, problems: int, heads: int) -> tuple[Tensor, Tensor]:
    """Hidden states of the answers [N, H], and the tokens 2, 3, ... ahead of each [N, heads]."""
    hidden, ahead = [], []
    for problem in generate(TRAIN_SEEDS[0], problems):
        chat = [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": problem.answer_text},
        ]
        prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        length = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        ids = torch.tensor(tokenizer(whole, add_special_tokens=False).input_ids)
        out = target.model(ids.unsqueeze(0)).last_hidden_state[0]  # after the final norm
        at = torch.arange(length - 1, len(ids) - 1 - heads)
        hidden.append(out[at])
        ahead.append(torch.stack([ids[at + 2 + i] for i in range(heads)], 1))
    return torch.cat(hidden), torch.cat(ahead)


def train(heads: Heads, lm_head: Tensor, hidden: Tensor, ahead: Tensor, epochs: int) -> None:
    batch = 512
    used, labels = ahead.unique(return_inverse=True)  # the few tokens that occur are enough
    columns = lm_head[used]
    steps = epochs * (len(hidden) // batch)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    step, count = 0, ahead.shape[1]
    for _ in range(epochs):
        order = torch.randperm(len(hidden))
        for chosen in order[: len(hidden) // batch * batch].split(batch):
            logits = heads(hidden[chosen].clone(), count) @ columns.T  # [N, n, used]
            loss = cross_entropy(logits.flatten(0, 1), labels[chosen].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % 50 == 0 or step == steps:
                right = (logits.argmax(-1) == labels[chosen]).float().mean(0)
                accuracy = ", ".join(f"{each:.2f}" for each in right.tolist())
                print(f"{step}/{steps} loss {loss.item():.3f}, accuracy: {accuracy}")


if __name__ == "__main__":
    main()
