#!/usr/bin/env python3
"""Runs a case of zofo in several processes at once on the same cores, beside the same alone: what is lost when they get in each other's way.

    cargo build --release -p zofo-benches --bin report
    ./crowd.py --threads 2 --processes 2 --turns 5 --seconds 5

Alone and together in turns. Prints the throughput of one process alone, of each of several, and their sum over the first.
"""

import argparse
import os
import statistics

from contestant import Contestant
from turns import REPORT


def together(contestants, seconds):
    """Throughput of each while all of them run."""
    for contestant in contestants:
        contestant.ask(seconds)
    answers = [contestant.answer() for contestant in contestants]
    return [runs * amount / time for runs, time, amount in answers]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="forward-loss/f32/8x128/zofo-cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each process")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn at least; much longer than a run")
    parser.add_argument("--report", default=REPORT)
    args = parser.parse_args()
    os.environ["ZOFO_BENCH_THREADS"] = str(args.threads)
    contestants = [Contestant([args.report, "--serve", args.case]) for _ in range(args.processes)]
    for contestant in contestants:
        contestant.wait_until_ready()
    alone, each = [], []
    for _ in range(args.turns):
        alone += together(contestants[:1], args.seconds)
        each.append(together(contestants, args.seconds))
    for contestant in contestants:
        contestant.close()
    ratios = sorted(sum(rates) / one for rates, one in zip(each, alone))
    shares = [statistics.median(rates) for rates in zip(*each)]
    print(f"{args.case}, {args.threads} threads a process, {args.turns} turns")
    print(f"alone: {statistics.median(alone):.1f} tokens/s")
    print(f"{args.processes} at once: {' + '.join(f'{s:.1f}' for s in shares)} tokens/s")
    print(f"sum over alone: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
