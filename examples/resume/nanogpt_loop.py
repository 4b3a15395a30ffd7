"""nanoGPT's way to resume: all in one ckpt.pt; docs/running.md has the command and its results."""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

file, steps = Path(sys.argv[1]) / "ckpt.pt", int(sys.argv[2])
file.parent.mkdir(exist_ok=True)
torch.manual_seed(1337)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
)
data = torch.randint(64, (4096,), generator=torch.Generator().manual_seed(0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = 0
if "--resume" in sys.argv:
    checkpoint = torch.load(file)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    step = checkpoint["iter_num"]
while step < steps:
    starts = torch.randint(len(data) - 32, (8,))
    batch = torch.stack([data[start : start + 32] for start in starts])
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    print(f"iter {step}: loss {loss.item()}")
    if step % 10 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step}, file)
