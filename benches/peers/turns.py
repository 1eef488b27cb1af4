#!/usr/bin/env python3
"""Times zofo and its peers in turns, A B C A B C, so that a machine that slows down for a while slows all of them.

    cargo build --release -p zofo-benches --bin report
    venv/bin/python turns.py --threads 2 --turns 5                       # every case of the table below
    venv/bin/python turns.py --only fo-step --types f32
    venv/bin/python turns.py --only prefill,decode --gguf smollm2-135m-q4_1.gguf --zofo-weights q4_1

Prints a Markdown table: medians, and the median over the turns of each contestant's time over that of the first, with the extremes. The
multiply-add ceiling is probed before every turn.
"""

import argparse
import os
import statistics
import sys

from contestant import Contestant

HERE = os.path.dirname(os.path.abspath(__file__))
REPORT = os.path.join(HERE, "../../target/release/report")


def commands(args):
    """By case: the contestants, zofo first."""

    def zofo(name):
        return [args.report, "--serve", name]

    def script(file, *arguments):
        return [sys.executable, os.path.join(HERE, file), "--threads", str(args.threads), *arguments]

    def pytorch(types, name, *more):
        return script("pytorch.py", "--types", types, "--serve", name, *more)

    table = {}
    for types in args.types.split(","):
        for op in ("forward-loss", "fo-step-qv", "fo-step-qv-last"):
            group = f"{op}/{types}/8x128"
            table[group] = [zofo(f"{group}/zofo-cpu"), pytorch(types, group)]
        group = f"zo-step-qv/{types}/8x128xq4"
        table[group] = [zofo(f"{group}/zofo-cpu+tangent"), zofo(f"{group}/zofo-cpu+value"), pytorch(types, group)]
        if types == "f32":
            for group in ("forward-loss/f32/ag-news-64", "fo-step-qv-last/f32/ag-news-64"):
                table[group] = [zofo(f"{group}/zofo-cpu+packed"), zofo(f"{group}/zofo-cpu+padded"), pytorch(types, group)]
    if args.gguf:
        for op in ("prefill/{}/512", "decode/{}/128"):
            group = op.format(args.zofo_weights)
            table[group] = [zofo(f"{group}/zofo-cpu"), script("llamacpp.py", args.gguf, "--serve", op.split("/")[0])]
    wanted = [w for w in args.only.split(",") if w]
    return {group: all for group, all in table.items() if not wanted or any(w in group for w in wanted)}


def per_run(contestant, seconds):
    contestant.ask(seconds)
    runs, total, amount = contestant.answer()
    return total / runs, amount


def turns(contestants, probe, args):
    """Seconds of one run by contestant and turn, its amount, and the probe's rate by turn."""
    seconds, amounts, ceilings = [[] for _ in contestants], [0] * len(contestants), []
    for _ in range(args.turns):
        time, flops = per_run(probe, 0.2)
        ceilings.append(flops / time / 1e9)
        for i, contestant in enumerate(contestants):
            time, amounts[i] = per_run(contestant, args.seconds)
            seconds[i].append(time)
    return seconds, amounts, ceilings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn at least")
    parser.add_argument("--types", default="f32,bf16")
    parser.add_argument("--only", default="", help="parts of the names of cases, with commas between")
    parser.add_argument("--gguf", help="a model for llama.cpp")
    parser.add_argument("--zofo-weights", default="q4_1", help="the type of zofo's random weights beside it")
    parser.add_argument("--report", default=REPORT)
    args = parser.parse_args()
    os.environ["ZOFO_BENCH_THREADS"] = str(args.threads)
    probe = Contestant([args.report, "--serve", f"ceiling/f32/{args.threads}-threads"]).wait_until_ready()
    print("| what | who | time | tokens/s | time / first | fma, GFLOP/s |\n|---|---|---|---|---|---|")
    for group, all in commands(args).items():
        contestants = []
        try:
            for command in all:
                contestants.append(Contestant(command).wait_until_ready())
            seconds, amounts, ceilings = turns(contestants, probe, args)
        except RuntimeError as error:
            print(f"| {group} | {error} | | | | |", flush=True)
            continue
        finally:
            for contestant in contestants:
                contestant.close()
        for contestant, times, amount in zip(contestants, seconds, amounts):
            ratios = sorted(t / first for t, first in zip(times, seconds[0]))
            median = statistics.median(times)
            ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            fma = f"{min(ceilings):.0f} to {max(ceilings):.0f}"
            who = contestant.name.rsplit("/", 1)[-1]
            print(f"| {group} | {who} | {median * 1e3:.1f} ms | {amount / median:.1f} | {ratio} | {fma} |", flush=True)
    probe.close()


if __name__ == "__main__":
    main()
