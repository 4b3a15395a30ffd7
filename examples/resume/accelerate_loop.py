"""accelerate's way to resume, as in its complete_nlp_example.py; docs/running.md has the command and its results."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import GPT2Config, GPT2LMHeadModel

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
accelerator = Accelerator(cpu=True)
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))  # dropout 0.1
ids = torch.randint(64, (64, 32), generator=torch.Generator().manual_seed(0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(ids, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
if "--resume" in sys.argv:
    newest = max(folder.glob("step_*"), key=lambda path: path.stat().st_ctime)
    accelerator.load_state(str(newest))
    step = int(newest.name.removeprefix("step_"))
model.train()
while step < steps:
    for batch in accelerator.skip_first_batches(loader, step % len(loader)) if step % len(loader) else loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step}: loss {loss.item()}")
        if step % 10 == 0:
            accelerator.save_state(str(folder / f"step_{step}"))
        if step == steps:
            break
