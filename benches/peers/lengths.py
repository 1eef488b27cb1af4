#!/usr/bin/env python3
"""Writes the list of lengths that the suite `text` packs: tokens of AG News rows, as the program makes prompts of them.

    pip install transformers gguf
    ./lengths.py ~/.cache/zofo/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf ../../../shared/data/ag_news/train.csv > ../src/cases/ag_news.txt

A random sample of the rows, the prompt of configs/agnews-smollm2.toml with its answer, cut to 128 tokens.
"""

import argparse
import csv
import os
import random

CLASSES = {"1": "World", "2": "Sports", "3": "Business", "4": "Sci/Tech"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="a GGUF file")
    parser.add_argument("data", help="train.csv")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=128)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    folder, name = os.path.split(args.tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(folder or ".", gguf_file=name)
    with open(args.data, newline="") as file:
        rows = random.Random(0).sample(list(csv.DictReader(file)), args.rows)
    texts = (f"{row['content']}\nTopic: {CLASSES[row['label']]}" for row in rows)
    lengths = [min(len(tokenizer(text).input_ids), args.longest) for text in texts]
    for i in range(0, len(lengths), 16):
        print(*lengths[i : i + 16])


if __name__ == "__main__":
    main()
