"""Writes the tokenizer models and goldens beside this file.

    python make_tokenizer_goldens.py [tok512.model]

Needs `pip install sentencepiece protobuf tokenizers`. Every id and text comes from the original implementations, run here; nothing of zofo takes part.
With the path of llama2.c's tok512.model, its goldens are written too (the model itself is test material outside the repository).
"""

import io, json, os, random, sys
import sentencepiece as spm
import tokenizers
from sentencepiece import sentencepiece_model_pb2 as m
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

D = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
base = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "  a  b   c ",
    "Once upon a time, there was a little girl named Lily.",
    "Once upon a time,\nthere was\n\n a\tfox.\r\n",
    "Hello, world!",
    "HELLO",
    "naïve café",
    "Führer",
    "нещо на Български",
    "日本語のテキスト",
    "🦙.cpp",
    "👩‍👩‍👧‍👦 family",
    "\u0000x\u0007",
    "▁already▁marked",
    "▁",
    "▁▁a",
    "a▁ b",
    "<s>",
    "</s> <unk> <0x41>",
    "aaaaaaaaaaaaaaaaaaaa",
    "ababababab",
    "lololololo",
    "ssssss tttttt",
    "the the  the   the",
    "1234567890",
    "3.14159e-10",
    "\u00a0nbsp\u3000ideographic",
    "e\u0301 é",
    "\ufeffbom",
    "\U0010ffff",
    "don't can't won't",
    "x" * 300,
    "he he hehe" * 30,
]
random.seed(7)
alph = ["a", "b", "e", "h", "t", "s", " ", " ", "the", "▁", "é", "\n", "🦙", "l", "o", "in", "nd", "."]
fuzz = ["".join(random.choice(alph) for _ in range(random.randint(1, 40))) for _ in range(120)]
fuzz += ["".join(random.choice("ab ") for _ in range(random.randint(1, 40))) for _ in range(40)]


def golden(sp, texts, idseqs):
    enc = [[t, sp.encode(t)] for t in texts]
    dec = []
    for ids in idseqs:
        dec.append([ids, sp.decode(ids)])
    return {"encode": enc, "decode": dec}


def seqs(sp, texts):
    n = sp.vocab_size()
    out = [sp.encode(t) for t in texts[:30]]
    out = [x for x in out if x]
    for _ in range(80):
        out.append([random.randrange(n) for _ in range(random.randint(1, 12))])
    by = [i for i in range(n) if sp.is_byte(i)]
    if by:
        for _ in range(80):
            out.append([random.choice(by) if random.random() < 0.8 else random.randrange(n) for _ in range(random.randint(1, 8))])
        b = lambda s: [sp.piece_to_id("<0x%02X>" % x) for x in s]
        for s in [
            b"\xe2\x96",
            b"\xe2\x96\x81",
            b"\xf0\x9f\xa6",
            b"\xf0\x9f\xa6\x99",
            b"\xff\xfe",
            b"\xc3\x28",
            b"\xe2\x28\xa1",
            b"\xf0\x90\x28\xbc",
            b"\xed\xa0\x80",
            b"\xc0\x80",
            b"\xf4\x90\x80\x80",
            " é".encode(),
        ]:
            out.append(b(s))
            out.append([1] + b(s) + [300])
    for lead in ([], [1], [1, 1]):
        for w in (["▁the"], ["▁", "▁the"], ["▁"], ["▁", "▁"]):
            ids = [sp.piece_to_id(p) for p in w]
            out.append(lead + ids + [2] + ids)
    return out


def dump_spm(name, sp):
    g = golden(sp, base + fuzz, seqs(sp, base + fuzz))
    g["source"] = "sentencepiece " + spm.__version__ + " (Python)"
    open(D + name, "w").write(
        json.dumps(g, ensure_ascii=False, separators=(",", ":")).replace('],["', '],\n["').replace(']],"', ']],\n"') + "\n"
    )


if len(sys.argv) > 1:
    sp = spm.SentencePieceProcessor(model_file=sys.argv[1])
    dump_spm("tok512_golden.json", sp)
corpus = [
    "the cat sat on the mat, and the dog sat on the log",
    "aaaa bbbb abab baba aabb",
    "    indented    text   here",
    "hello hello hello world",
] * 20


def train(name, **kw):
    f = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=f,
        model_type="bpe",
        normalization_rule_name="identity",
        minloglevel=2,
        hard_vocab_limit=False,
        num_threads=1,
        **kw,
    )
    p = m.ModelProto()
    p.ParseFromString(f.getvalue())
    b = p.SerializeToString()
    open(D + name + ".model", "wb").write(b)
    dump_spm(name + "_golden.json", spm.SentencePieceProcessor(model_proto=b))
    print(name, len(b), len(p.pieces))


train(
    "spaces_bytes",
    vocab_size=380,
    byte_fallback=True,
    remove_extra_whitespaces=False,
    allow_whitespace_only_pieces=True,
    user_defined_symbols=["<|user|>", "he he", "▁▁▁▁"],
)
train("unknown_tidy", vocab_size=120, byte_fallback=False, remove_extra_whitespaces=True, add_dummy_prefix=True)
# ties: several pieces of the same score
p = m.ModelProto()
p.ParseFromString(open(D + "spaces_bytes.model", "rb").read())
for x in p.pieces:
    if x.type == 1:
        x.score = -float(len(x.piece) % 2)
p.normalizer_spec.add_dummy_prefix = False
b = p.SerializeToString()
open(D + "ties.model", "wb").write(b)
dump_spm("ties_golden.json", spm.SentencePieceProcessor(model_proto=b))
texts = [t for t in base + fuzz[:60]]
corpus = [
    "the cat sat on the mat, and the dog sat on the log",
    "aaaa bbbb abab baba aabb",
    "Hello hello world, don't can't won't",
    "    indented    text   here",
    "1 22 333 naïve café über",
] * 20


def dump(name, t, extra):
    t.save(D + name + ".json", pretty=False)
    t = Tokenizer.from_file(D + name + ".json")
    t.no_truncation()
    t.no_padding()
    random.seed(3)
    n = t.get_vocab_size()
    seqs = [t.encode(x, add_special_tokens=False).ids for x in texts] + [
        [random.randrange(n) for _ in range(random.randint(1, 10))] for _ in range(40)
    ]
    g = {
        "encode": [[x, t.encode(x, add_special_tokens=False).ids] for x in texts],
        "encode_bos": [[x, t.encode(x, add_special_tokens=True).ids] for x in texts[:12]],
        "decode": [[s, t.decode(s, skip_special_tokens=True)] for s in seqs if s],
        "source": "tokenizers " + tokenizers.__version__ + " (Python)",
    }
    g.update(extra)
    open(D + name + "_golden.json", "w").write(
        json.dumps(g, ensure_ascii=False, separators=(",", ":")).replace('],["', '],\n["').replace(']],"', ']],\n"') + "\n"
    )
    print(name, n)


# Llama-3/Qwen2 style: byte-level BPE, one with a bos template and a stored truncation
for name, bos in (("bytelevel_plain", False), ("bytelevel_bos", True)):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                tokenizers.Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=330,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>", "<|begin_of_text|>"],
            show_progress=False,
        ),
    )
    if bos:
        b = t.token_to_id("<|begin_of_text|>")
        t.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B", special_tokens=[("<|begin_of_text|>", b)]
        )
        t.enable_truncation(4)
        t.enable_padding(length=64)
    dump(name, t, {"bos": t.token_to_id("<|begin_of_text|>") if bos else None, "eos": t.token_to_id("<|endoftext|>")})
# Llama-2 style: byte fallback, converted as transformers does it
v = {"<unk>": 0, "<s>": 1, "</s>": 2}
for i in range(256):
    v["<0x%02X>" % i] = len(v)
merges = []
for l, r in [
    ("▁", "t"),
    ("h", "e"),
    ("▁t", "he"),
    ("a", "b"),
    ("▁", "a"),
    ("i", "n"),
    ("o", "n"),
    ("▁", "▁"),
    ("▁▁", "▁▁"),
    ("e", "l"),
    ("l", "o"),
]:
    for x in (l, r, l + r):
        if x not in v:
            v[x] = len(v)
    merges.append((l, r))
for c in "abcdefghijklmnopqrstuvwxyzO,.":
    v.setdefault(c, len(v))
t = Tokenizer(models.BPE(v, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
t.add_special_tokens([AddedToken("<unk>", normalized=False), AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
dump("llama2_style", t, {"bos": 1, "eos": 2})
