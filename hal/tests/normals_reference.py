#!/usr/bin/env python3
"""Known answers of `zofo_hal::perturb`, from an implementation that shares nothing with it but the published coefficients.

Needs numpy. Philox in Python integers, the normals in numpy float32 (each operation rounded by itself, no fused multiply-add).
Prints the table of `perturb_known_answers.rs`; `--check FILE` looks for its rows in a file instead.
"""
import sys

import numpy as np

F, U, I = np.float32, np.uint32, np.int32


def bits(*words):
    return np.array(words, dtype=U).view(F)


NEG_2_LOG = bits(0xC0000000, 0x3F7FFFEB, 0xBF2AAA7E, 0x3F000A28, 0xBECCE9D3, 0x3EA81C47, 0xBE8F54AE, 0x3E9D86FE, 0xBE8F922B)
SIN = bits(0x3FC90FDB, 0xBF255E12, 0x3DA34052, 0xBB998CC6)
COS = bits(0x3F800000, 0xBF9DE9D1, 0x3E81D8C7, 0xBCA75889)
NEG_2_LN_2 = bits(0xBFB17218)[0]
LOW = bits(0x3F2AAAAB)[0]


def philox(counter, key):
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & mask, (p >> 32) ^ c[3] ^ k[1], p & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def radius(w):
    x = (w >> U(1)).view(I).astype(F) + F(0.5)
    # 2^k (1 + f) with 1 + f in [2/3, 4/3).
    m, e = np.frexp(x)
    m, e = np.where(m < LOW, m * F(2), m), np.where(m < LOW, e - 1, e)
    f, k = m - F(1), (e - 31).astype(F)
    c = NEG_2_LOG
    f2 = f * f
    f4 = f2 * f2
    p03 = (c[3] * f + c[2]) * f2 + (c[1] * f + c[0])
    p47 = (c[7] * f + c[6]) * f2 + (c[5] * f + c[4])
    p = (c[8] * f4 + p47) * f4 + p03
    return np.sqrt(k * NEG_2_LN_2 + f * p)


def cos_sin(w):
    quarter = (w.astype(np.uint64) + (1 << 29) >> 30).astype(np.int64)
    v = ((w.astype(np.int64) - (quarter << 30)) * 4).astype(I).astype(F) * F(2.0**-32)
    x = v * v
    s = v * (((SIN[3] * x + SIN[2]) * x + SIN[1]) * x + SIN[0])
    c = ((COS[3] * x + COS[2]) * x + COS[1]) * x + COS[0]
    turned = [(c, s), (-s, c), (-c, -s), (s, -c)]
    return tuple(np.choose(quarter & 3, [t[i] for t in turned]) for i in (0, 1))


def z(seed, step, direction, tensor, first, n):
    """Elements first .. first + n as float32."""
    blocks = range(first // 4, (first + n - 1) // 4 + 1)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    w = np.array([philox((b, tensor, direction, step), key) for b in blocks], dtype=U)
    out = np.empty_like(w, dtype=F)
    for j in (0, 2):
        r, (c, s) = radius(w[:, j]), cos_sin(w[:, j + 1])
        out[:, j], out[:, j + 1] = r * c, r * s
    return out.reshape(-1)[first % 4 :][:n]


def direction(domain, micro_batch, q):
    return domain << 30 | micro_batch << 16 | q


def tensor(layer, projection, factor):
    return layer * 16 + projection * 2 + factor


# name, seed, step, direction, tensor, (row0, col0, ld), first column, elements; the last three begin inside a block.
CASES = [
    ("origin", 0, 0, direction(0, 0, 0), tensor(0, 0, 0), (0, 0, 64), 0, 16),
    ("all_fields", 0x0123_4567_89AB_CDEF, 1000, direction(0, 5, 9), tensor(29, 6, 1), (17, 0, 576), 0, 8),
    ("exit_domain", 42, 3, direction(1, 16383, 65535), tensor(2, 2, 0), (0, 0, 288), 4, 8),
    ("top_of_every_field", 2**64 - 1, 2**32 - 1, direction(1, 16383, 65535), tensor(2**28 - 1, 6, 1), (65535, 0, 65536), 65528, 8),
    ("shard_at_1", 42, 7, direction(0, 1, 2), tensor(4, 3, 1), (3, 0, 9), 2, 11),
    ("shard_at_2", 42, 7, direction(0, 1, 2), tensor(4, 3, 0), (2, 101, 301), 3, 10),
    ("shard_at_3", 42, 7, direction(0, 1, 2), tensor(4, 4, 0), (5, 1000, 8192), 3, 9),
]


def table():
    rows = []
    for name, seed, step, d, t, (row0, col0, ld), col, n in CASES:
        first = row0 * ld + col0 + col
        words = ", ".join(f"0x{x:08x}" for x in z(seed, step, d, t, first, n).view(U))
        rows.append(f'("{name}", {seed:#x}, {step}, {d:#010x}, {t:#x}, [{row0}, {col0}, {ld}], {col}, &[{words}]),')
    return "\n".join(rows)


def strip(text):
    return "".join(text.split()).replace(",]", "]").replace(",)", ")").rstrip(",")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        with open(sys.argv[2], encoding="utf-8") as file:
            text = strip(file.read())
        missing = [row for row in table().splitlines() if strip(row) not in text]
        sys.exit("not in the file:\n" + "\n".join(missing) if missing else 0)
    print(table())
