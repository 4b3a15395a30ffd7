"""Tokenize a corpus that one machine is too slow for with datatrove. hfgolf trains on the .ds files it writes.

    pip install datatrove
    python examples/tokenize_with_datatrove.py text tokenizer.json tokens
    hfgolf train --config small --data.source shards --data.files tokens/train --data.val_files tokens/val \\
        --tokenizer.kind pretrained --tokenizer.name_or_path tokenizer.json

`text` has the folders train and val with Parquet files, whose column `text` has a document per row. The tokenizer is a
tokenizer.json or a name on the Hub. A task takes whole files, and the same command again runs only what is missing.
On a cluster, datatrove's SlurmPipelineExecutor takes the same steps, and a partition and a time.
"""

import sys

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer

EOS_TOKEN = "<|endoftext|>"  # that of the tokenizer; it ends each document
TASKS, WORKERS = 8, 2


def main(text: str, tokenizer: str, tokens: str) -> None:
    for split in ("train", "val"):
        steps = [
            ParquetReader(f"{text}/{split}"),
            # training draws its blocks at random from all files
            DocumentTokenizer(f"{tokens}/{split}", tokenizer, eos_token=EOS_TOKEN, shuffle_documents=False),
        ]
        LocalPipelineExecutor(steps, tasks=TASKS, workers=WORKERS, logging_dir=f"{tokens}/logs/{split}").run()


if __name__ == "__main__":
    main(*sys.argv[1:])
