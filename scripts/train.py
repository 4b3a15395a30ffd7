"""The command `hfgolf train`, for `accelerate launch scripts/train.py --config configs/small.yaml`."""

import sys

from hfgolf.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
