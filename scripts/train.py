"""The command `hfgolf train`, for `accelerate launch scripts/train.py --config configs/small.yaml`."""

from hfgolf.cli import main

if __name__ == "__main__":
    main(verb="train")
