#!/usr/bin/env python3
"""Times PyTorch with Transformers and PEFT on the cases of zofo-benches' suite `model`.

    pip install -r requirements.txt
    ./pytorch.py --threads 2                            # random weights, SmolLM2-135M by its shapes
    ./pytorch.py --model PATH --only fo-step-qv,zo-step-qv --types bf16 --directions 12

Prints a JSON line per case: median seconds, tokens per second, and the peak memory of the case's process.
"""

import argparse
import os
import sys

from timing import measure, serve

# Tokens of rows of AG News; lengths.py counted them.
AG_NEWS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../src/cases/ag_news.txt")

# SmolLM2-135M.
SHAPES = dict(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
)


def load(args, types):
    """The model, from a folder with weights or from a configuration alone, and a batch of random tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[types]
    has_weights = args.model and any(f.endswith((".safetensors", ".bin")) for f in os.listdir(args.model))
    if has_weights:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    else:
        config = AutoConfig.from_pretrained(args.model) if args.model else LlamaConfig(**SHAPES)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    ids = torch.randint(0, model.config.vocab_size, (args.sequences, args.tokens))
    return model, ids


def load_adapted(args, types):
    """The same with LoRA of rank 8 on q and v."""
    from peft import LoraConfig, get_peft_model

    model, ids = load(args, types)
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    return model, ids, [p for p in model.parameters() if p.requires_grad]


def ag_news(args, model):
    """Batches padded to their longest sequence, as a tokenizer with `padding=True` makes them: ids, mask, and whether a token is text."""
    import torch

    with open(AG_NEWS) as file:
        lengths = torch.tensor([int(n) for n in file.read().split()])
    for part in lengths.split(args.sequences):
        ids = torch.randint(0, model.config.vocab_size, (len(part), int(part.max())))
        mask = (torch.arange(ids.shape[1]) < part[:, None]).long()
        last = torch.arange(ids.shape[1]) == part[:, None] - 1
        yield ids, mask, last


def forward_loss_text(args, types):
    import torch

    model, _ = load(args, types)
    model.eval()
    batches = [(ids, mask, ids.masked_fill(mask == 0, -100)) for ids, mask, _ in ag_news(args, model)]

    @torch.no_grad()
    def run():
        for ids, mask, labels in batches:
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.item()

    return run


def first_order_text(args, types):
    model, _, parameters = load_adapted(args, types)
    model.train()
    step = training_step(model, parameters)
    batches = [dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(~last, -100)) for ids, mask, last in ag_news(args, model)]

    def run():
        for batch in batches:
            step(batch)

    return run


def training_step(model, parameters):
    import torch

    optimiser = torch.optim.AdamW(parameters, lr=1e-4)

    def step(batch):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        loss.item()

    return step


def forward_loss(args, types):
    import torch

    model, ids = load(args, types)
    model.eval()

    @torch.no_grad()
    def run():
        model(input_ids=ids, labels=ids).loss.item()

    return run


def first_order(args, types, last_only):
    model, ids, parameters = load_adapted(args, types)
    model.train()
    labels = ids.clone()
    if last_only:
        labels[:, :-1] = -100
    step = training_step(model, parameters)
    return lambda: step(dict(input_ids=ids, labels=labels))


def zeroth_order(args, types, two_sided):
    """A step as MeZO (Malladi et al. 2023) does it: parameters are perturbed in place, and z is drawn again from its seed."""
    import torch

    model, ids, parameters = load_adapted(args, types)
    model.eval()
    generator = torch.Generator()
    epsilon, rate, step = 1e-3, 1e-9, 0

    def add(seed, factor):
        generator.manual_seed(seed)
        for p in parameters:
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=factor)

    def loss():
        return model(input_ids=ids, labels=ids).loss.item()

    @torch.no_grad()
    def run():
        nonlocal step
        step += 1
        directions = 1 if two_sided else args.directions
        base = 0.0 if two_sided else loss()
        slopes = []
        for q in range(directions):
            seed = step * 1000 + q
            add(seed, epsilon)
            plus = loss()
            if two_sided:
                add(seed, -2 * epsilon)
                slopes.append((plus - loss()) / (2 * epsilon))
                add(seed, epsilon)
            else:
                slopes.append((plus - base) / epsilon)
                add(seed, -epsilon)
        for q, slope in enumerate(slopes):
            add(step * 1000 + q, -rate * slope / directions)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder; with config.json alone its weights are random")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--types", default="f32,bf16")
    parser.add_argument("--only", default="", help="parts of the names of cases, with commas between")
    parser.add_argument("--directions", type=int, default=4)
    parser.add_argument("--serve", metavar="GROUP", help="the case of this whole name, for turns.py")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    wanted = [w for w in args.only.split(",") if w]

    versions = ", ".join(f"{name} {__import__(name).__version__}" for name in ("torch", "transformers", "peft"))
    print(versions, file=sys.stderr)
    for types in args.types.split(","):
        batch = f"{types}/{args.sequences}x{args.tokens}"
        with open(AG_NEWS) as file:
            lengths = [int(n) for n in file.read().split()]
        text = f"{types}/ag-news-{len(lengths)}"
        for group, who, prepare, *more in (
            (f"forward-loss/{batch}", "pytorch", forward_loss),
            (f"fo-step-qv/{batch}", "pytorch+peft", first_order, False),
            (f"fo-step-qv-last/{batch}", "pytorch+peft", first_order, True),
            (f"zo-step-qv/{batch}xq{args.directions}", "pytorch+mezo", zeroth_order, False),
            (f"zo-step-qv/{batch}x2-sided", "pytorch+mezo", zeroth_order, True),
            (f"forward-loss/{text}", "pytorch+padded", forward_loss_text),
            (f"fo-step-qv-last/{text}", "pytorch+peft+padded", first_order_text),
        ):
            tokens = sum(lengths) if text in group else args.sequences * args.tokens
            if group == args.serve:
                return serve(f"{group}/{who}", tokens, prepare, args, types, *more)
            if not args.serve and (not wanted or any(w in group for w in wanted)):
                measure(group, who, tokens, args.rounds, args.threads, prepare, args, types, *more)


if __name__ == "__main__":
    main()
