"""What counting words gets on the embedded data: multinomial logistic regression, trained on all training lines, scored on the held-out ones.

usage: bag_of_words.py TRAIN.tsv HELD_OUT.tsv      (lines `class<TAB>text`, as `cargo run --example device_logs` prints them)
"""

import re
import sys
from collections import Counter

import torch
import torch.nn.functional as F


def read(path):
    rows = [line.rstrip("\n").split("\t", 1) for line in open(path, encoding="utf-8")]
    return [label for label, _ in rows], [re.findall(r"[a-z]+|\d+|[^\w\s]", text.lower()) for _, text in rows]


def grams(words, n):
    return [" ".join(words[i : i + k]) for k in range(1, n + 1) for i in range(len(words) - k + 1)]


def matrix(rows, index):
    x = torch.zeros(len(rows), len(index))
    for i, row in enumerate(rows):
        for word, count in Counter(row).items():
            if word in index:
                x[i, index[word]] = count
    return x


def macro_f1(guess, truth, classes):
    scores = []
    for c in range(classes):
        right = ((guess == c) & (truth == c)).sum().item()
        made, there = (guess == c).sum().item(), (truth == c).sum().item()
        scores.append(2 * right / max(1, made + there))
    return sum(scores) / classes


def main():
    (train_y, train_x), (test_y, test_x) = read(sys.argv[1]), read(sys.argv[2])
    names = sorted(set(train_y))
    y, truth = (torch.tensor([names.index(label) for label in labels]) for labels in (train_y, test_y))
    for n, kind in ((1, "words"), (2, "words and bigrams")):
        a, b = ([grams(row, n) for row in rows] for rows in (train_x, test_x))
        seen = Counter(g for row in a for g in row)
        index = {g: i for i, g in enumerate(sorted(g for g, count in seen.items() if count > 1))}
        x, z = matrix(a, index), matrix(b, index)
        best = None
        for decay in (1e-4, 1e-3, 1e-2):  # the best on the held-out lines is taken, which favours the baseline
            w = torch.zeros(len(index), len(names), requires_grad=True)
            optimiser = torch.optim.LBFGS([w], max_iter=200, line_search_fn="strong_wolfe")

            def closure():
                optimiser.zero_grad()
                loss = F.cross_entropy(x @ w, y) + decay * w.square().sum()
                loss.backward()
                return loss

            optimiser.step(closure)
            f1 = macro_f1((z @ w).argmax(1), truth, len(names))
            own = macro_f1((x @ w).argmax(1), y, len(names))
            best = max(best or (0.0, 0.0), (f1, own))
        print(f"{kind}: {len(index)} features, macro-F1 {best[0]:.3f} held out, {best[1]:.3f} on the training lines")


if __name__ == "__main__":
    main()
