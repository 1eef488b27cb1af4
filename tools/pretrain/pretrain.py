"""Pre-trains the embedded model and writes it in Hugging Face layout. See README.md for the command that made the committed files."""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

from corpus import Corpus

BOS, EOS = "<s>", "</s>"
LINE_WEIGHT = 0.2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 768,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float16",
}


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE over the corpus; digits stand alone, so that values are compared digit by digit."""
    corpus = Corpus(seed=1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((corpus.document() for _ in range(20_000)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, CONFIG["rms_norm_eps"])


def linear(inner: int, outer: int) -> nn.Linear:
    layer = nn.Linear(inner, outer, bias=False)
    nn.init.normal_(layer.weight, std=inner**-0.5)
    return layer


def together(x, *layers: nn.Linear):
    """What each layer makes of `x`, in one product, which is faster."""
    weights = [layer.weight for layer in layers]
    return F.linear(x, torch.cat(weights)).split([len(w) for w in weights], dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        width, head = CONFIG["hidden_size"], CONFIG["head_dim"]
        heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
        self.head = head
        self.q_proj, self.o_proj = linear(width, heads * head), linear(heads * head, width)
        self.k_proj, self.v_proj = linear(width, kv_heads * head), linear(width, kv_heads * head)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        parts = together(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.view(b, t, -1, self.head).transpose(1, 2) for y in parts)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x):
        gate, up = together(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        width = CONFIG["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Model(nn.Module):
    """LLaMA with the parameter names of the Hugging Face layout."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = Norm(CONFIG["hidden_size"])
        # Residual branches start small, so that depth does not make the stream grow.
        for layer in self.layers:
            for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                out.weight.data.mul_((2 * len(self.layers)) ** -0.5)
        head, positions = CONFIG["head_dim"], torch.arange(CONFIG["max_position_embeddings"]).float()
        angles = positions[:, None] * CONFIG["rope_theta"] ** (-torch.arange(0, head, 2).float() / head)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def batches(tokenizer: Tokenizer, seed: int, tokens: int, first: int = 0):
    """Endless batches of about `tokens` tokens: documents of like length, padded at the end, with the weight of each target.

    What follows a document's first line break follows from what stands before it, and counts more than the line, most of which is chance.
    """
    corpus, order, line_break = Corpus(seed), torch.Generator().manual_seed(seed), tokenizer.token_to_id("Ċ")
    for pool in itertools.count():
        texts = [corpus.document(first=pool < first) for _ in range(4096)]
        documents = [e.ids + [1] for e in tokenizer.encode_batch(texts)]
        documents.sort(key=len)
        made, rows, longest = [], [], 0
        for ids in documents:
            longest = max(longest, len(ids))
            rows.append(ids)
            if longest * len(rows) >= tokens:
                made.append(rows)
                rows, longest = [], 0
        for i in torch.randperm(len(made), generator=order).tolist():
            rows = made[i]
            longest = max(len(r) for r in rows)
            ids = torch.tensor([r + [1] * (longest - len(r)) for r in rows])
            weights = torch.zeros(ids.shape)
            for weight, row in zip(weights, rows):
                line = row.index(line_break) + 1 if line_break in row else len(row)
                weight[:line], weight[line : len(row)] = LINE_WEIGHT, 1.0
            yield ids, weights[:, 1:]


def loss_of(model, ids, weights):
    losses = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


class Muon:
    """Momentum whose steps are made orthogonal (Jordan et al. 2024): for matrices it needs about half the tokens that AdamW needs."""

    def __init__(self, matrices, lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.by_shape = {}
        for p in matrices:
            self.by_shape.setdefault(p.shape, []).append(p)
        self.state = {shape: torch.zeros(len(list_), *shape) for shape, list_ in self.by_shape.items()}

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for shape, matrices in self.by_shape.items():
            gradient, mean = torch.stack([p.grad for p in matrices]), self.state[shape]
            mean.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp(mean, self.momentum)) * max(1.0, shape[0] / shape[1]) ** 0.5
            for p, u in zip(matrices, update):
                p.mul_(1 - self.lr * scale * self.weight_decay).sub_(u, alpha=self.lr * scale)


def orthogonal(x):
    """The nearest orthogonal matrices, nearly (quintic Newton-Schulz iteration)."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


def save(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": p.detach().half().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write config.json, model.safetensors and tokenizer.json to")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per step")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate, for embedding and gains")
    parser.add_argument("--matrix-lr", type=float, default=0.02, help="Muon's learning rate, for all other matrices")
    parser.add_argument("--first", type=int, default=1, help="pools of 4096 documents that are short incidents alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer, model = train_tokenizer(), Model()
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    muon = Muon(matrices, args.matrix_lr)
    adam = torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    held_out = [b for b, _ in zip(batches(tokenizer, 1_000_003, args.tokens), range(10))]
    train, begin, warmup, mean = batches(tokenizer, args.seed + 2, args.tokens, args.first), time.time(), 50, 0.0
    for step in range(args.steps):
        scale = min(1.0, (step + 1) / warmup, 2 * (args.steps - step) / args.steps)
        adam.param_groups[0]["lr"] = args.lr * scale
        loss = loss_of(model, *next(train))
        model.zero_grad()
        loss.backward()
        muon.step(scale)
        adam.step()
        mean += loss.item()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {mean / 50:.4f}, {time.time() - begin:.0f} s", flush=True)
            mean = 0.0
        if (step + 1) % 50 == 0:
            save(model, tokenizer, args.out)
    with torch.no_grad():
        loss = sum(loss_of(model, *b).item() for b in held_out) / len(held_out)
    save(model, tokenizer, args.out)
    print(f"held-out loss {loss:.4f} nats, {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
