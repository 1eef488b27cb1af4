#!/usr/bin/env python3
"""Writes small well-formed files for the fuzz targets to start from, into corpus/TARGET. Python's standard library alone.

Usage: make_seeds.py        (from any folder)
"""

import json
import shutil
import struct
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEST_DATA = HERE.parent / "ops" / "tests" / "data"


def text(s):
    b = s.encode()
    return struct.pack("<Q", len(b)) + b


def value(v):
    if isinstance(v, bool):
        return struct.pack("<I?", 7, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, str):
        return struct.pack("<I", 8) + text(v)
    head = lambda kind: struct.pack("<IIQ", 9, kind, len(v))
    if isinstance(v[0], str):
        return head(8) + b"".join(map(text, v))
    if isinstance(v[0], float):
        return head(6) + struct.pack(f"<{len(v)}f", *v)
    return head(5) + struct.pack(f"<{len(v)}i", *v)


def gguf(keys, tensors):
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for k, v in keys.items():
        out += text(k) + value(v)
    data = b""
    for name, dims, kind, raw in tensors:
        data += bytes(-len(data) % 32)
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += raw
    return out + bytes(-len(out) % 32) + data


def model(arch, vocab):
    """One layer of width 32, in Q4_0 where rows allow it, so that the file is small."""
    keys = {
        "general.architecture": arch,
        f"{arch}.block_count": 1,
        f"{arch}.context_length": 64,
        f"{arch}.embedding_length": 32,
        f"{arch}.feed_forward_length": 32,
        f"{arch}.attention.head_count": 2,
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.attention.key_length": 4,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
    }
    shapes = [("token_embd.weight", [32, vocab]), ("output_norm.weight", [32])]
    shapes += [(f"blk.0.{n}.weight", s) for n, s in [
        ("attn_norm", [32]), ("ffn_norm", [32]), ("attn_k", [32, 4]), ("attn_v", [32, 4]), ("attn_output", [8, 32]),
        ("ffn_gate", [32, 32]), ("ffn_up", [32, 32]), ("ffn_down", [32, 32])]]
    shapes.append(("blk.0.attn_q.weight", [32, 8]))
    tensors = []
    for name, dims in shapes:
        if len(dims) > 1 and dims[0] % 32 == 0:
            tensors.append((name, dims, 2, (b"\x00\x3c" + bytes(range(16))) * dims[1]))
        else:
            count = dims[0] * (dims[1] if len(dims) > 1 else 1)
            tensors.append((name, dims, 0, struct.pack(f"<{count}f", *(i / 64 for i in range(count)))))
    return keys, tensors


def sentencepiece_keys():
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + ["\u2581", "a", "b", "ab", "\u2581a"]
    types = [2, 3, 3] + [6] * 256 + [1] * 5
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -0.5, -0.25],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": True,
    }


def bpe_keys(pre):
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    tokens = ["<|endoftext|>", "<|im_end|>"] + letters + ["\u0120a", "on"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["\u0120 a", "o n"], "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def safetensors():
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(32)


def main():
    files = {"safetensors/small": safetensors()}
    for name, arch, tokens in [
        ("llama", "llama", sentencepiece_keys()), ("qwen2", "qwen2", bpe_keys("qwen2")), ("smollm", "llama", bpe_keys("smollm")),
        ("llama3", "llama", bpe_keys("llama-bpe")), ("gpt2", "llama", bpe_keys("gpt-2")),
    ]:
        keys, tensors = model(arch, len(tokens["tokenizer.ggml.tokens"]))
        files[f"gguf/{name}"] = gguf(keys | tokens, tensors)
    for path, data in files.items():
        path = HERE / "corpus" / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for target, pattern in [("sentencepiece", "*.model"), ("tokenizer_json", "*.json")]:
        folder = HERE / "corpus" / target
        folder.mkdir(parents=True, exist_ok=True)
        for path in TEST_DATA.glob(pattern):
            if not path.stem.endswith("_golden"):
                shutil.copyfile(path, folder / path.name)


if __name__ == "__main__":
    main()
