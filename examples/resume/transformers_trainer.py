"""transformers' Trainer and its way to resume; docs/running.md has the command and its results."""

import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        print(json.dumps({"step": state.global_step, "loss": logs.get("loss")}))


folder, steps = sys.argv[1], int(sys.argv[2])
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))  # dropout 0.1
ids = torch.randint(64, (64, 32), generator=torch.Generator().manual_seed(0))
settings = TrainingArguments(folder, max_steps=steps, save_steps=10, logging_steps=1, use_cpu=True, disable_tqdm=True)
trainer = Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in ids], callbacks=[Log()])
trainer.train(resume_from_checkpoint="--resume" in sys.argv and get_last_checkpoint(folder))
