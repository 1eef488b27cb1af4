#!/usr/bin/env python3
"""Times llama.cpp, through the package llama-cpp-python, on the prefill and decode cases of zofo-benches' suite `model`.

    pip install llama-cpp-python
    ./llamacpp.py --threads 2 smollm2-135m-q8_0.gguf smollm2-135m-bf16.gguf

Prints a JSON line per file and case: median seconds, tokens per second, and the peak memory of the case's process.
"""

import argparse
import os
import random

from timing import measure, serve


def load(path, threads, context):
    from llama_cpp import Llama

    model = Llama(path, n_ctx=context, n_batch=context, n_ubatch=context, n_threads=threads, n_threads_batch=threads, verbose=False)
    rng = random.Random(1)
    return model, [rng.randrange(model.n_vocab()) for _ in range(context)]


def logits(model, ids):
    model.eval(ids)
    # Waits until they are there.
    model._ctx.get_logits()


def prefill(path, threads, tokens):
    """Logits behind a prompt: those of its last token alone."""
    model, ids = load(path, threads, tokens)

    def run():
        model.reset()
        logits(model, ids)

    return run


def decode(path, threads, seen):
    """Logits behind one more token."""
    model, ids = load(path, threads, seen + 1)
    model.eval(ids[:seen])

    def run():
        # What lies behind is taken out of the cache by `eval`.
        model.n_tokens = seen
        logits(model, ids[seen:])

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="GGUF files; the group's type is the file's name")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--serve", choices=("prefill", "decode"), help="one case of the first file, for turns.py")
    args = parser.parse_args()
    if args.serve:
        tokens, prepare, length = {"prefill": (args.prompt, prefill, args.prompt), "decode": (1, decode, args.context)}[args.serve]
        return serve(f"{args.serve}/llama.cpp", tokens, prepare, args.models[0], args.threads, length)
    for path in args.models:
        name = os.path.splitext(os.path.basename(path))[0]
        measure(f"prefill/{name}/{args.prompt}", "llama.cpp", args.prompt, args.rounds, args.threads, prefill, path, args.threads, args.prompt)
        measure(f"decode/{name}/{args.context}", "llama.cpp", 1, args.rounds, args.threads, decode, path, args.threads, args.context)


if __name__ == "__main__":
    main()
